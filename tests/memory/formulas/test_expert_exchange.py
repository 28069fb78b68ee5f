"""What expert parallelism sends by formula: by hand, and against compiled steps on eight simulated devices."""

import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.cost import flops
from bytescope.memory.formulas import communication_volume, reconcile
from bytescope.memory.formulas.communication_volume import EXCHANGES as FORMULAS
from bytescope.memory.formulas.communication_volume import layer_exchanges
from bytescope.memory.formulas.model_shape import ExpertShape
from bytescope.memory.report import report_page
from bytescope.model.experts.exchange import DISPATCHES as TRAINED
from bytescope.model.experts.exchange import EXCHANGES
from bytescope.model.names import NAMES
from bytescope.model.remat.policies import POLICIES
from bytescope.train.plan.config_facts import model_facts
from bytescope.train.program.config_files import flatten
from support.facts import facts_of
from support.toy import small_config, small_program

MOE = {
    "model.experts": 8,
    "model.experts_per_token": 2,
    "model.d_expert": 32,
    "model.n_layers": 3,
    "model.dense_layers": 1,
    "batch.micro": 2,
    "mesh.fsdp": 2,
    "mesh.expert": 4,
}
EXPERTS = ExpertShape(8, 2, 64)


@pytest.mark.parametrize(
    "dispatch, again, expected",
    [
        ("allgather", 0, {"all-gather": 2 * 4 * 1024 * (32 + 8), "reduce-scatter": 4 * 1024 * (2 * 32 + 8)}),
        ("allgather", 1, {"all-gather": 4 * 1024 * (3 * 32 + 4 * 8), "reduce-scatter": 4 * 1024 * (2 * 32 + 8)}),
        ("all_to_all", 0, {"all-to-all": 8 * 256 * (4 * 32 + 2 * 4)}),
        ("ragged_all_to_all", 1, {"ragged-all-to-all": 2 * 1024 * (5 * 32 + 3 * 4)}),
    ],
)
def test_a_layer_by_hand(dispatch, again, expected):
    """1,024 tokens of width 16 in bf16, 2 of 8 experts each, shared by 4 devices: 32 bytes a row, 4 of its number."""
    found = layer_exchanges(
        dispatch, EXPERTS, tokens=1024, width=16, itemsize=2, size=4, row_repeats=again, weight_repeats=again
    )
    assert {one.kind: one.bytes for one in found} == expected


def test_every_dispatch_of_the_trainer_has_a_formula():
    assert {"auto", *FORMULAS} == set(TRAINED) and set(FORMULAS) <= set(EXCHANGES)
    layout = small_program({**MOE, "model.experts": 4}, 8).layout

    def chosen(platform, **keys):
        return model_facts(flatten(small_config({**MOE, **keys})), platform=platform).exchange

    for slotted, kernel in ((False, "grouped"), (True, "capacity")):
        assert chosen("cpu", **{"model.moe_kernel": kernel}) == layout.exchange(slotted)
    assert chosen("cuda") == "ragged_all_to_all"
    assert chosen("cpu", **{"mesh.dispatch": "ragged_all_to_all"}) == ""


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"custom"}))
def test_rows_move_again_unless_they_are_kept(policy):
    """How often the backward pass repeats the forward pass, and whether with its rows, as the trainer's policies do."""
    row, found = POLICIES[policy], model_facts(flatten(small_config({**MOE, "remat.policy": policy}))).policy
    assert found.forward_passes == (0 if row.saveable is None else 2 if row.nested else 1)
    assert ("dispatched" in found.save) == ("dispatched" in row.names)


def test_experts_are_gathered_over_the_axes_that_do_not_share_them():
    """Dense parameters over fsdp and expert, a device's own experts over fsdp; on one host of four nothing is left."""
    facts = model_facts(flatten(small_config({**MOE, "remat.policy": "full"})), platform="cpu")
    total, routed = 100_000, 2 * 8 * 3 * 32 * 32
    found = {
        (one.kind, one.axes): one.bytes
        for one in communication_volume.expected_collectives(facts, {"fsdp": 2, "expert": 4}, total)
    }
    assert found["all-gather", ("fsdp", "expert")] == 2 * 4 * (total - routed)
    assert found["all-gather", ("fsdp",)] == 2 * 4 * routed // 4
    assert found["reduce-scatter", ("fsdp",)] == 4 * routed // 4
    alone = communication_volume.expected_collectives(facts, {"fsdp": 1, "expert": 4}, total)
    assert {one.axes for one in alone} == {("expert",)}


@pytest.fixture(
    scope="module",
    params=[
        ("all_to_all", "capacity", "selective"),
        pytest.param(("allgather", "scan", "minimal"), marks=pytest.mark.exhaustive),
    ],
    ids=["all_to_all", "allgather"],
)
def step(request):
    """(formula, report, FLOPs counted) of a step whose experts are shared by four devices."""
    overrides = {**MOE, **dict(zip(("mesh.dispatch", "model.moe_kernel", "remat.policy"), request.param))}
    program = small_program(overrides, 8)
    compilation, facts = program.compile_for_report(), facts_of(program)
    formula = reconcile.formula_of(facts, "cpu")
    return formula, report_of(compilation, facts=facts, names=NAMES), flops.count(compilation.jaxpr)


def test_exchanged_bytes_are_the_formula(step):
    """All that goes over the axis of experts, within 5 per cent."""
    rows = [row for row in step[1].communication if row.axes == ("expert",) and row.formula_bytes]
    assert {row.kind for row in rows} in ({"all-gather", "reduce-scatter"}, {"all-to-all"})
    for row in rows:
        assert row.wire_bytes == pytest.approx(row.formula_bytes, rel=0.05), row.kind


def test_the_formulas_meet_the_report(step):
    """Residuals with buffers of all rows; parameters, total and active; FLOPs of active parameters."""
    formula, report, counted = step
    assert report.breakdown["residuals"] == pytest.approx(formula.residual_bytes, rel=0.1)
    inactive = 2 * 6 * 3 * 32 * 32
    total, active = report.parameters["total"], report.parameters["active"]
    assert total - active == inactive
    assert f"{total:,} parameters, {active:,} of them active" in report_page.render(report)
    assert formula.model_flops < counted.model_flops
    if "all-to-all" in {item.kind for item in report.collectives if item.axes == ("expert",)}:
        assert report.residuals_by_name["dispatched"] > 0, "kept as a collective brought it"
