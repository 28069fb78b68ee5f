"""What a pipelined step holds and sends: a stash that does not grow with micro-batches, sends by their formula."""

import jax
import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.cost import flops
from bytescope.memory.devices import targets
from bytescope.train.pipeline.schedule import full_ticks, make_schedule
from bytescope.train.plan.report_remedies import with_remedies
from bytescope.train.program.config_files import flatten
from bytescope.train.program.program import pipeline_notes
from support.described import SMALL_GPU, compile_described
from support.exhaustive import exhaustive
from support.facts import facts_of
from support.toy import small_program

# The stream outweighs all else, so that bytes are those of the stash.
WIDE = {
    "model.n_layers": 8,
    "batch.mode": "scan",
    "mesh.stage": 4,
    "mesh.fsdp": 1,
    "batch.micro": 32,
    "data.seq_len": 64,
    "remat.policy": "full",
    "optimizer.name": "momentum",
}
SLOT = 32 * 64 * 32 * 4 * 2  # bytes of a slot: two layers' inputs


def report(name, micro_batches, virtual=1):
    program = small_program(
        {**WIDE, "batch.accumulation": micro_batches, "pipeline.schedule": name, "pipeline.virtual": virtual}, 4
    )
    config, facts = flatten(program.config), facts_of(program)
    return with_remedies(report_of(program.compile_for_report(), config=config, facts=facts))


@pytest.fixture(scope="module")
def one():
    return report("1f1b", 8)


@pytest.mark.exhaustive
def test_the_stash_does_not_grow_with_micro_batches(one):
    more, v = report("1f1b", 16), report("v", 8)
    tokens = 2 * 8 * 32 * 64 * 4  # bytes of eight micro-batches more, which are arguments
    assert more.allocated_bytes - one.allocated_bytes == pytest.approx(tokens, abs=0.02 * one.allocated_bytes)
    schedules = [make_schedule(name, 4, 8, chunks) for name, chunks in (("1f1b", 1), ("v", 2))]
    assert [max(schedule.stash_slots) for schedule in schedules] == [7, 8]  # those of a V are half as large
    assert one.allocated_bytes - v.allocated_bytes > 2 * SLOT
    assert one.residuals_by_name["(blocks input)"] == 7 * SLOT > 0.99 * one.breakdown["residuals"]
    (found,) = [each for each in one.findings if each.kind == "uneven_stash"]
    assert found.bytes == pytest.approx(3 * SLOT, rel=0.01)  # eight slots of one layer for seven of two
    assert found.flags == "--config.pipeline.schedule=v --config.pipeline.virtual=2"
    assert not [each for each in v.findings if each.kind == "uneven_stash"]


@pytest.mark.exhaustive
def test_flops_are_those_of_one_device(one):
    """Of what stages do, not of their ticks; their time is that of the schedule's table."""
    plain = small_program({**WIDE, "mesh.stage": 1, "batch.accumulation": 8})
    staged = small_program({**WIDE, "batch.accumulation": 8}, 4)
    counts = [flops.count(each.step.trace(each.state, each.batch_shapes).jaxpr) for each in (plain, staged)]
    assert counts[0] == counts[1]
    schedules = [make_schedule("1f1b", 4, 8), make_schedule("interleaved", 4, 8, 2), make_schedule("v", 4, 8, 2)]
    assert [full_ticks(schedule) for schedule in schedules] == [11, 19, 22]
    assert any("the 14 ticks as 11 full ticks" in note for note in one.notes)


def test_what_stages_send_is_the_formula(one):
    (sends,) = [entry for entry in one.communication if entry.kind == "collective-permute"]
    assert sends.wire_bytes == sends.formula_bytes == 2 * 14 * SLOT // 2
    (note,) = [note for note in one.notes if "7, 5, 3, 1 of the 7 slots" in note]
    assert "4 stages, 1f1b: each stage is idle 27.3 % of the time and stores 1.75 times the activations" in note


@pytest.mark.oracle("cuda")
@pytest.mark.parametrize("tensor", exhaustive(2, 1))
def test_cudnns_kernel_compiles_inside_stages(tensor):
    """Its partitioner refuses a mesh of which some axes are manual, be the others of one device."""
    found = compile_described(
        f"h100:2x{tensor}",
        {
            **SMALL_GPU,
            "model.n_layers": 2,
            "model.n_kv_heads": 2,
            "model.attention": "cudnn",
            "mesh.stage": 2,
            "mesh.fsdp": 1,
            "mesh.tensor": tensor,
            "batch.mode": "scan",
            "batch.accumulation": 2,
        },
    )
    assert "dot_product_attention_fwd" in str(found.jaxpr)
    # A stage on each host: they alone talk over the network.
    rows = report_of(found, target=targets.parse(f"h100:2x{tensor}")).communication
    assert {row.axes: row.hosts for row in rows if row.kind == "collective-permute"} == {("stage",): 2}
    assert {row.hosts for row in rows if row.axes == ("tensor",)} == ({1} if tensor > 1 else set())


def test_rows_of_no_layer_are_told():
    fields = {**WIDE, "model.n_layers": 7, "batch.accumulation": 4}
    program = small_program(fields, 4)
    layer = sum(leaf.size // 8 for leaf in jax.tree.leaves(program.state.params["blocks"]))
    assert pipeline_notes(program, program.state)[-1].startswith(f"{layer:,} of the parameters are unused rows")
    even = small_program({**fields, "model.n_layers": 8}, 4)
    assert len(pipeline_notes(even, even.state)) == 2
    plain = small_program()
    assert pipeline_notes(plain, plain.state) == ()
