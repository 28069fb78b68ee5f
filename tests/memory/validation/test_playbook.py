"""The Playbook's rows: which are said, and what of each is held."""

from collections import Counter

import pytest

from bytescope.memory.config_keys import (
    BATCH_ACCUMULATION,
    BATCH_MICRO,
    MESH_FSDP,
    MESH_SEQUENCE_PARALLEL,
    MESH_STRATEGY,
    MESH_TENSOR,
)
from bytescope.memory.validation import setups_playbook

pytestmark = pytest.mark.quick


def test_the_rows_that_are_compiled_are_those_of_one_stage_without_suspicion():
    rows = setups_playbook.rows()
    assert len(rows) == 532 and len({row.id for row in rows}) == 532
    said = Counter(row.gpus for row in rows if not row.reason)
    assert said == {8: 26, 32: 52, 64: 52}
    assert sum("pipeline" in row.reason for row in rows) == 398
    assert sum("suspect" in row.reason for row in rows) == 4
    assert all(row.config and row.overrides for row in rows if not row.reason)


def test_every_row_computes_one_batch_on_its_devices():
    for row in setups_playbook.rows():
        if row.config:
            of = row.overrides
            sequences = int(of[MESH_FSDP]) * int(of[BATCH_MICRO]) * int(of[BATCH_ACCUMULATION])
            assert sequences == 256, row
            assert int(of[MESH_FSDP]) * int(of[MESH_TENSOR]) == row.gpus, row


def test_a_row_says_its_setup():
    row = next(row for row in setups_playbook.rows() if row.setup == "dp2 tp4 zero1 1x128")
    assert (row.model, row.target, row.tensor) == ("llama-8.86B", "h100:8", 4)
    assert row.overrides[MESH_STRATEGY] == "zero1" and row.overrides[MESH_SEQUENCE_PARALLEL] == "True"
    assert row.measured_seconds == pytest.approx(21.0113) and row.measured_bytes == 36946 << 20
    assert row.launch_seconds == pytest.approx(4.4e-3 * 32 * 128) and row.host_bound is True
    plain = next(row for row in setups_playbook.rows() if row.setup == "dp8 tp1 zero0 2x16")
    assert plain.overrides[MESH_STRATEGY] == "ddp" and plain.overrides[MESH_SEQUENCE_PARALLEL] == "False"
    assert plain.host_bound is False


def test_every_row_is_a_config_of_ours():
    from bytescope.train.planning.adapter import Adapter

    for row in setups_playbook.rows()[::7]:
        if row.config:
            Adapter().check(row.config, list(row.overrides.items()))
