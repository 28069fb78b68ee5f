"""A command predicts its host memory before its long work, and warns in one line if the computer has less."""

import pytest

from bytescope.memory.host.host_ledger import ledger
from bytescope.memory.records.host_record import HostTerm
from bytescope.memory.report import host_notice

pytestmark = pytest.mark.quick
GIB = 2**30


@pytest.mark.parametrize(("free", "warned"), [(2 * GIB, True), (8 * GIB, False)])
def test_a_warning_has_both_sizes_and_the_remedy(free, warned, monkeypatch, capsys):
    monkeypatch.setattr(host_notice, "free_host_bytes", lambda: free)
    base = host_notice.resident_term("export")
    host = host_notice.expect_host([base, HostTerm("export", "arrays", 4 * GIB)])
    assert host.predicted("export") == base.bytes + 4 * GIB and base.bytes > 2**20
    assert abs(host.node_bytes - free - base.bytes) < 2**26  # what is available, and what the process has already
    assert host.terms[1] in ledger().terms
    host_notice.warn_if_too_large(host, "give --dtype=bfloat16")
    line = capsys.readouterr().err
    assert line.count("\n") == warned
    if warned:
        assert line.startswith("warning: host memory") and "(in export) of " in line and "TOO MUCH" in line
        assert line.endswith(": give --dtype=bfloat16\n")
