"""Each subcommand, each key with a table of values and each public name has a test that the README's line runs."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[1]


@pytest.fixture
def listed(monkeypatch):
    monkeypatch.syspath_prepend(TESTS / "bench")
    import coverage_list

    return coverage_list


def test_nothing_is_without_a_test(listed):
    found = listed.coverage()
    needed = [name for name in found if "=" not in name]
    assert {name.split()[0] for name in needed} == {"command", "key", "name"} and len(needed) > 60
    missing = [name for name in needed if not found[name]]
    assert not missing, "no test of the default set has: " + ", ".join(missing)


FILE = """
import pytest
from bytescope import memory
from support.exhaustive import exhaustive
WORDS = ["fit", "tiny"]
KEYS = {"batch.mode": "scan"}

def test_helpers_count():
    main(WORDS); small_program(KEYS)

@pytest.mark.parametrize("clip", ["optimizer.clip=global", *exhaustive("optimizer.clip=layer")])
def test_rows(clip):
    memory.watch(clip)

@pytest.mark.exhaustive
def test_left_out():
    main(["diff"])

@pytest.mark.oracle("cuda", "peft")
def test_skipped():
    main(["check"])
"""


def test_what_counts_as_a_test(listed, tmp_path, monkeypatch):
    (tmp_path / "test_one.py").write_text(FILE)
    monkeypatch.setattr(listed, "TESTS", tmp_path)
    monkeypatch.setattr(listed, "ROOT", tmp_path)
    found = listed.coverage()
    assert found["command fit"] == ["test_one.py::test_helpers_count"] == found["key batch.mode=scan"]
    assert found["name watch"] == ["test_one.py::test_rows"] == found["key optimizer.clip"]
    assert not any(found[name] for name in ("key optimizer.clip=layer", "command diff", "command check"))
