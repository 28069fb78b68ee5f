"""Runtime overheads: their formulas, their place in a report, and their bytes in a run on the CPU."""

import dataclasses
import json

import jax
import pytest

from bytescope import memory
from bytescope.memory.allocators.program_events import ProgramCall, events_of
from bytescope.memory.allocators.replay import PagedMemory, replay
from bytescope.memory.analysis import judge, report_of
from bytescope.memory.devices import targets
from bytescope.memory.devices.chips import CONTEXT_BYTES
from bytescope.memory.errors import ReportError
from bytescope.memory.peak import runtime_overheads
from bytescope.memory.peak.runtime_overheads import Facts, LoopOverhead
from bytescope.memory.records.report_record import CARD, POOL, ReportRecord, RuntimeOverhead, load
from bytescope.memory.report.report_text import overheads
from bytescope.memory.units import GIB, MIB
from bytescope.train.plan import run_memory
from bytescope.train.program.program import build
from bytescope.train.run import loop
from support.described import described
from support.toy import small_config, small_program


def found(**facts):
    return {row.name: row.bytes for row in runtime_overheads.find(Facts(**facts))}


@pytest.mark.parametrize(("size", "counted"), [(0, 0), (1, 256), (256, 256), (257, 512), (2**30 + 4, 2**30 + 256)])
def test_a_request_is_rounded_up_on_cuda_alone(size, counted):
    assert runtime_overheads.rounded(size, "cuda") == counted
    assert runtime_overheads.rounded(size, "cpu") == runtime_overheads.rounded(size, "") == size


def test_every_item_by_hand():
    loop = LoopOverhead(waiting=(100, 300), results=2)
    facts = {
        "loop": loop,
        "requests": (1000, 256, 4),
        "results": (4,),
        "context": 7,
        "communicators": 2,
        "code": 5,
        "untuned_product": 40 * MIB,
        "hopper": True,
    }
    # requests 24 + 0 + 252, waiting 156 + 212, two results of 252 each
    assert found(platform="cuda", **facts) == {
        "batches waiting": 400,
        "results not yet read": 8,
        "rounding": 24 + 252 + 156 + 212 + 2 * 252,
        "cuBLAS workspace": 32 * MIB,
        "context": 7,
        "machine code": 5,
        "NCCL": 2 * runtime_overheads.NCCL_CHANNELS * runtime_overheads.NCCL_CONNECTION_BYTES,
    }
    assert found(platform="cpu", **facts) == {"batches waiting": 400, "results not yet read": 8, "context": 7}
    assert found() == {}


@pytest.mark.parametrize(
    ("product", "hopper", "workspace"),
    [(100 * MIB, True, 32 * MIB), (100 * MIB, False, 4 * MIB), (MIB, True, MIB), (0, True, 0)],
)
def test_the_workspace_of_cublas_is_bounded_by_its_operands(product, hopper, workspace):
    assert found(platform="cuda", untuned_product=product, hopper=hopper).get("cuBLAS workspace", 0) == workspace


ROWS = (RuntimeOverhead("rounding", 30, POOL, "from the source"), RuntimeOverhead("context", 500, CARD, "estimate"))

DAMAGED = [{"name": "x", "bytes": "many", "where": POOL, "source": ""}]


def made(**fields):
    return ReportRecord(peak_bytes=900, allocated_bytes=1000, breakdown={"params": 900, "fragmentation": 100}, **fields)


@pytest.mark.parametrize(("limit", "verdict"), [(1030, "tight"), (1029, "exceeds"), (2000, "fits"), (None, "unknown")])
def test_the_limit_is_for_the_items_of_the_pool_too(limit, verdict):
    report = judge(made(runtime_overheads=ROWS), limit)
    assert report.predicted_bytes == 1030 and report.verdict == verdict
    assert sum(report.breakdown.values()) == report.allocated_bytes  # the compiler's figures stay apart


def test_a_report_keeps_them_in_its_json(tmp_path):
    report = made(runtime_overheads=ROWS)
    report.save(tmp_path / "r.json")
    value = json.loads((tmp_path / "r.json").read_text())
    assert value["predicted_bytes"] == 1030 and value["allocated_bytes"] == 1000
    assert value["runtime_overheads"] == [dataclasses.asdict(row) for row in ROWS]
    assert load(tmp_path / "r.json").runtime_overheads == ROWS
    with pytest.raises(ReportError, match="RuntimeOverhead"):
        ReportRecord.from_json({**value, "runtime_overheads": DAMAGED})
    assert overheads(report) == "predicted in use 1.01 KiB: allocated, rounding 30 B; outside the pool context 500 B"
    assert overheads(made()) == ""
    more = made(runtime_overheads=(*ROWS, RuntimeOverhead("cuBLAS workspace", 70, POOL, "from the source")))
    assert "allocated, cuBLAS workspace 70 B, rounding 30 B;" in overheads(more), "the largest first"


def test_a_file_without_them_or_with_their_earlier_name():
    value = made(runtime_overheads=ROWS).to_json()
    overheads = value.pop("runtime_overheads")
    assert ReportRecord.from_json(value).runtime_overheads == ()
    with pytest.raises(ReportError, match="unseen, which is now runtime_overheads: write it again"):
        ReportRecord.from_json({**value, "unseen": overheads})


def test_a_program_for_a_card_that_is_not_here_has_the_cards_items():
    @jax.jit
    def product(state, batch):
        return state + 1, (batch @ batch.T).sum()

    target, where = targets.parse("h200"), jax.sharding.SingleDeviceSharding(described("h200")[0])
    arrays = [jax.ShapeDtypeStruct((257, 3), "float32", sharding=where) for _ in range(2)]
    compilation = _compiled(product.lower(*arrays))
    report = report_of(compilation, target=target, loop=LoopOverhead((12,), 1))
    rows = {row.name: row.bytes for row in report.runtime_overheads}
    outputs = [b for b in report.buffers if b.category == "outputs" and b.phase == "output"]
    asked = [3084, 3084, report.xla.temp_bytes, 12, *(b.bytes for b in outputs)]
    held = [3084, 4]  # what one call gives back
    assert rows["results not yet read"] == sum(held) and rows["batches waiting"] == 12
    assert rows["rounding"] == sum(-size % 256 for size in (*asked, *held))
    assert rows["cuBLAS workspace"] <= 2 * 3084  # both operands, were it a call of cuBLAS
    assert rows["context"] == CONTEXT_BYTES == target.reserved_bytes
    alone = report_of(compilation, target=target)  # without the arrays of a loop
    on_bfc, growing, paged, single = memory.replay(alone)
    assert on_bfc["peak_in_use_bytes"] == alone.predicted_bytes + -rows["cuBLAS workspace"] % 256
    assert on_bfc["limit_bytes"] == on_bfc["reserved_bytes"] == target.limit_bytes == paged["reserved_bytes"]
    assert growing["reserved_bytes"] == single["reserved_bytes"] == 2 * MIB
    assert {row["verdict"] for row in (on_bfc, growing, paged, single)} == {"fits"}


def _compiled(lowered):
    from bytescope.memory.devices.compiler import compile_lowered

    return compile_lowered(lowered)


@pytest.mark.exhaustive
def test_the_batches_that_wait_are_there_while_the_loop_runs(monkeypatch, tmp_path):
    """Counted in a real run: when the next update's batches are put, those of the last are still held."""
    config = small_config(
        {
            "batch.accumulation": 3,
            "batch.micro": 2,
            "train.steps": 4,
            "train.sample_tokens": 0,
            "model.vocab_size": 256,
            "model.n_layers": 1,
            "train.eval_sequences": 2,
            "train.log_every": 1,
            "mesh.fsdp": 1,
            "mesh.data": 8,
        }
    )
    most, feed = [], loop.feed

    def counted(program, *rest):
        for batches in feed(program, *rest):
            shape = batches[0]["inputs"].shape
            most.append(sum(array.shape == shape and array.dtype == "int32" for array in jax.live_arrays()))
            yield batches

    monkeypatch.setattr(loop, "feed", counted)
    from rich.console import Console

    loop.run(config, workdir=tmp_path / "run", extend=False, console=Console(quiet=True))
    program = build(config)
    kept = run_memory.loop_overhead(program)
    assert max(most) == len(kept.waiting) + len(program.batch_shapes) == 12  # two updates of three, two arrays each
    assert set(kept.waiting) == {2 * 32 * 4}
    saved = load(tmp_path / "run" / "memory.json")
    assert {row.name: row.bytes for row in saved.runtime_overheads}["batches waiting"] == 10 * 2 * 32 * 4


def test_the_programs_beside_the_step_hold_the_state_and_their_own(monkeypatch):
    program = small_program({"train.sample_tokens": 0, "model.n_layers": 1})
    state = run_memory.device_bytes(program.state)
    assert state == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.state))
    others = run_memory.other_programs(program)
    sizes = run_memory.peaks(program, others)
    assert set(sizes) == {"init", "evaluation"}
    assert sum(others[0].results) == state and others[0].makes_state
    stats = program.evaluate.lower(program.state.params, program.eval_shapes).compile().memory_analysis()
    held = 2 * run_memory.device_bytes(program.eval_shapes)
    assert sizes["evaluation"] == state + held + stats.temp_size_in_bytes + stats.output_size_in_bytes
    assert sizes["init"] >= state
    step = ProgramCall("step", state=others[0].results, temp=1000)
    monkeypatch.setattr(run_memory, "call_of", lambda report, name: step)
    run = run_memory.run_calls(None, others)
    assert [(call.name, count) for call, count in run] == [("init", 1), ("step", 3), ("evaluation", 2), ("step", 1)]
    replayed = replay(events_of(run), PagedMemory(GIB))
    assert (replayed.peak_in_use, replayed.peak_program) == (max(*sizes.values(), state + 1000), "evaluation")
    hosted = small_program({"train.sample_tokens": 0, "model.n_layers": 1, "offload.optimizer": True})
    assert run_memory.device_bytes(hosted.state) < state / 2
    assert dataclasses.asdict(run_memory.loop_overhead(program))["results"] == 1
