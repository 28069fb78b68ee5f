"""ZeRO's classic account beside what the compiler holds, and why they differ."""

import jax
import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.formulas.model_shape import StepLayout, gpt
from bytescope.memory.peak import ledger
from bytescope.memory.records.report_record import ROWS, Buffer, ReportRecord
from support import programs

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("stage", "total"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_zero_of_the_ledger(stage, total):
    """Rajbhandari et al. 2020, figure 1, for 8 devices."""
    report = ReportRecord(100, 100, dict.fromkeys(ROWS, 0) | {"params": 50, "optimizer": 100, "gradients": 50})
    rows = {row.role: row for row in ledger.zero_rows(report, ledger.State(100, stage, 8))}
    assert rows["total"].classic == total and rows["total"].held == 2.0
    assert rows["params"].held == 0.5 and rows["params"].reason


@pytest.mark.parametrize("stage, degree, shards", [(0, 1, 2.5), (1, 8, 2.5), (3, 8, 8)])
def test_experts_are_sharded_whatever_the_stage(stage, degree, shards):
    """Four fifths of the parameters over four devices: 1/5 + 4/5/4 of them on each."""
    state = ledger.State(100, stage, degree, routed=0.8, expert=4)
    assert state.shards("params") == pytest.approx(shards)


def test_agreement_needs_no_reason():
    report = ReportRecord(100, 100, dict.fromkeys(ROWS, 0) | {"params": 200, "optimizer": 1200, "gradients": 200})
    rows = ledger.zero_rows(report, ledger.State(100, 0))
    assert [row.reason for row in rows] == [""] * 5 and rows[-1].held == rows[-1].classic == 16
    assert ledger.zero_rows(report, ledger.State(0, 0)) == () == ledger.zero_rows(report, ledger.State(100))


@pytest.mark.parametrize(
    ("size", "reason"),
    [(400, "float32"), (100, "float32, part of them at the peak"), (200, ""), (0, "none is alive at the peak")],
)
def test_gradients_have_their_reason(size, reason):
    alive = [Buffer("g", size, (size // 4,), "float32", "gradients", at_peak=True)] if size else []
    report = ReportRecord(100, 100, dict.fromkeys(ROWS, 0) | {"gradients": size}, buffers=tuple(alive))
    rows = {row.role: row for row in ledger.zero_rows(report, ledger.State(100, 0))}
    assert (rows["gradients"].held, rows["gradients"].reason) == (size / 100, reason)


def test_leaves_that_do_not_divide_are_named(data_parallel, fully_sharded):
    model = gpt(1, 8, 1, 8)
    question = Question(1, model, StepLayout(data=8, zero=3))
    facts = ModelFacts(question=question, roles={"data": "state"})
    rows = {row.role: row for row in report_of(fully_sharded, facts=facts).zero}
    parameters = sum(leaf.size for leaf in jax.tree.leaves(programs.parameters()))
    assert rows["params"].held * parameters == 4 * parameters / 8
    assert "replicated on every device" not in rows["params"].reason
    left = report_of(data_parallel, facts=facts)
    reason = {row.role: row.reason for row in left.zero}["params"]
    assert "replicated on every device: state['params']['blocks']['w_down']" in reason and "7 more" not in reason
    assert {row.role: row.held for row in left.zero}["params"] == 4.0


def test_ledger_by_hand():
    def held(role, dtype, size, **fields):
        return Buffer(role, size, (4, 4), dtype, role, "argument", **fields)

    buffers = [
        held("params", "bfloat16", 32),
        held("optimizer", "float32", 64),
        held("optimizer", "float32", 64),
        held("optimizer", "float32", 64),
        held("batch", "int32", 999),
        Buffer("g", 32, (4, 4), "bfloat16", "gradients", "backward", start=2, end=9),
        Buffer("later", 32, (4, 4), "bfloat16", "gradients", "backward", start=10, end=11),
        Buffer("gathered", 99, (8, 4), "bfloat16", "gradients", "backward", start=2, end=9),
    ]
    rows = ledger.rows(buffers)
    assert [(r.role, r.dtype, r.bytes_per_param) for r in rows] == [
        ("params", "bfloat16", 2.0),
        ("gradients", "bfloat16", 2.0),
        ("optimizer", "float32", 12.0),
        ("total", "", 16.0),
    ]
    assert ledger.rows([])[-1].bytes_per_param == 0.0
