"""Traces of an H100 (jax 0.11.2), cut by tests/bench/cut_trace.py: two updates each of llama_1b under remat=minimal,
scanned, and of gpt2_small under remat=offload, unrolled. Kernels inside CUDA graphs have no instruction in the trace.
"""

import dataclasses
import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from bytescope.memory.__main__ import main
from bytescope.memory.profile import breakdown, instruction_seconds, kernel_owners, xplane
from bytescope.memory.profile.breakdown import Instructions
from bytescope.memory.profile.op_scopes import LOOPS, OpScope, OpScopes
from bytescope.memory.records import report_record

pytestmark = pytest.mark.quick

TRACES = Path(__file__).parent / "traces"
LLAMA, OFFLOAD = "llama_1b_minimal", "gpt2_small_unrolled_offload"


@dataclasses.dataclass
class Traced:
    trace: xplane.ProfilerTrace
    scopes: OpScopes
    operations: tuple
    breakdown: breakdown.Breakdown
    comparison: instruction_seconds.Comparison


def read_trace(name):
    trace = xplane.parse(gzip.decompress((TRACES / f"{name}.xplane.pb.gz").read_bytes()))
    scopes = OpScopes(trace)
    attribution = scopes.main_attribution()
    operations = kernel_owners.name_kernels(trace.operations, "jit_step", attribution.module)
    found = breakdown.find(trace, 1, scopes)
    report = report_record.load(TRACES / f"{name}.report.json")
    return Traced(trace, scopes, operations, found, instruction_seconds.compare(found, attribution, report))


def sums(rows):
    """Kind or phase -> (measured, predicted) seconds."""
    return {name: pair for name, *pair in map(dataclasses.astuple, rows)}


@pytest.fixture(scope="module")
def llama():
    return read_trace(LLAMA)


@pytest.fixture(scope="module")
def offload():
    return read_trace(OFFLOAD)


def kernels_of(traced, name):
    """Kernels of an instruction per update, without the numbers in their names."""
    found = Counter(one.kernel.split("(")[0] for one in traced.operations if one.name == name)
    return {kernel: count / 2 for kernel, count in found.items()}


def test_every_kernel_has_an_instruction(llama, offload):
    for traced in (llama, offload):
        graphs = [one for one in traced.trace.operations if one.name.startswith("command_buffer")]
        assert len(graphs) > 0.9 * len([one for one in traced.trace.operations if one.name])
        assert not any(one.name.startswith("command_buffer") for one in traced.operations)
        names = {one.name for one in traced.scopes.main_attribution().module.instructions.values()}
        assert {one.name for one in traced.operations if one.program[1]} <= names
        assert len(traced.operations) == len(traced.trace.operations)


def test_library_calls_run_once_per_layer_with_their_own_kernels(llama):
    """Each call of cuBLAS and cuDNN in the body of a loop of 16 layers runs 16 times, with kernels of its library."""
    module = llama.scopes.main_attribution().module
    calls = [one for one in module.instructions.values() if one.target.startswith(("__cublas", "__cudnn"))]
    runs = Counter(one.name for one in llama.operations if not one.continues_run)
    assert len(calls) == 21 and {runs[one.name] for one in calls} == {2 * 16}
    families = defaultdict(set)
    for one in llama.operations:
        families[one.name].add(kernel_owners._family(one.kernel))
    for call in calls:
        library = "cublas" if "cublas" in call.target else "cudnn"
        assert families[call.name] <= {library, "memset"}, call.name
    backward = kernels_of(llama, "dot_product_attention_bwd.0")
    assert backward["void cudnn::fusion::compute_dot_do_o_specialized<true, 64>"] == 16
    assert backward["void cudnn::fusion::convert_dq_to_16bits<true>"] == 16
    assert backward["void cudnn::fusion::fmha_reduce_head<true>"] == 32
    assert sum(count for kernel, count in backward.items() if "bprop" in kernel) == 16


def test_instructions_that_share_a_kernel_are_told_apart(llama):
    """XLA compiled one kernel for two casts in a row; each of them has one run per layer."""
    for name in ("loop_convert_fusion.13", "loop_convert_fusion.14"):
        assert kernels_of(llama, name) == {"loop_convert_fusion_13": 16}


def test_copies_of_an_asynchronous_fusion_belong_to_its_start(llama):
    assert kernels_of(llama, "fusion-start.7") == {"memcpy128": 16}


def test_updates_are_counted_without_annotations(llama, offload):
    for traced in (llama, offload):
        assert (traced.breakdown.steps, traced.breakdown.updates, traced.breakdown.calls) == ((), 2, 1)
        starts = [one.start for one in traced.operations if one.program[1]]
        stops = [one.stop for one in traced.operations if one.program[1]]
        assert traced.breakdown.wall == max(stops) - min(starts)
    two = breakdown.find(llama.trace, 2, llama.scopes)
    assert (two.updates, two.calls, two.measured) == (1, 2, pytest.approx(2 * llama.breakdown.measured))
    assert breakdown.find(llama.trace, 3, llama.scopes).updates == 2  # two calls are no update of three


def test_the_table_adds_up_and_leaves_nothing_over(llama, offload):
    for traced in (llama, offload):
        found = traced.breakdown
        assert sum(row.taken for row in found.instructions) == found.busy
        unknown = sum(taken for (phase, part), taken in found.cells.items() if "other" in (phase, part))
        assert unknown < 0.001 * found.busy
    by_phase = {phase: round(1e3 * pair[0], 1) for phase, pair in sums(llama.comparison.by_phase).items()}
    assert by_phase == {"forward": 135.7, "recompute": 3.9, "backward": 169.7, "optimizer": 13.1, "other": 0.0}


def test_copies_to_the_host_are_transfers_and_hide_behind_compute(offload):
    copies = [row for row in offload.breakdown.instructions if row.scope.component == "transfers" and row.scope.opcode]
    assert len(copies) == 24 and {row.scope.opcode for row in copies} == {"copy-start"}
    running = sum(row.running for row in copies)
    taken = sum(row.taken for row in copies)
    assert offload.breakdown.hidden["transfers"] == pytest.approx(running - taken, rel=0.1)
    assert taken < 0.3 * running
    measured, predicted = sums(offload.comparison.by_kind)["host link"]
    assert measured == pytest.approx(offload.breakdown.seconds(running), rel=0.01)
    assert 0.85 < measured / predicted < 1.05


def test_measured_and_predicted_seconds_are_of_the_same_instructions(llama):
    """One stream: the seconds of all kinds are the busy time, except that a kernel may start just before the previous
    one ends. The kinds that were predicted are the ones measured.
    """
    kinds = sums(llama.comparison.by_kind)
    assert sum(measured for measured, _ in kinds.values()) == pytest.approx(
        llama.breakdown.seconds(llama.breakdown.busy), rel=2e-3
    )
    ratios = {kind: measured / predicted for kind, (measured, predicted) in kinds.items() if predicted}
    assert set(ratios) == {"products", "attention", "memory", "copies"}
    assert all(0.7 < ratio < 1.3 for ratio in ratios.values())
    rows = {row.name: row for row in llama.comparison.instructions}
    backward = rows["dot_product_attention_bwd.0"]
    assert (backward.kind, backward.phase, backward.component) == ("attention", "backward", "attention")
    assert (
        backward.measured_seconds == pytest.approx(0.0629, rel=0.01)
        and backward.predicted_seconds > backward.measured_seconds
    )
    assert not [
        row for row in rows.values() if not row.measured_seconds and row.predicted_seconds > 1e-4
    ]  # all work was found
    assert sum(row.predicted_seconds for row in rows.values()) == pytest.approx(
        sum(predicted for _, predicted in sums(llama.comparison.by_phase).values()), rel=1e-3
    )


def test_phases_are_predicted_as_they_are_traced(llama, offload):
    """Casts and copies to the host that the compiler added have no op_name: both sides take the phase of what they
    read.
    """
    for traced in (llama, offload):
        phases = {phase: pair for phase, pair in sums(traced.comparison.by_phase).items() if phase != "other"}
        ratios = {phase: measured / predicted for phase, (measured, predicted) in phases.items()}
        assert set(ratios) == {"forward", "recompute", "backward", "optimizer"}
        assert all(0.85 < ratio < 1.2 for ratio in ratios.values()), ratios


def test_a_loop_takes_the_time_between_its_instructions(llama):
    """The trace of a CPU has a loop as an instruction, which runs as long as all instructions inside it."""
    loop = Instructions("while.6", OpScope("backward", LOOPS, opcode="while"), taken=7 * 10**9, count=1, running=10**13)
    traced = dataclasses.replace(llama.breakdown, instructions=(*llama.breakdown.instructions, loop))
    report = report_record.load(TRACES / f"{LLAMA}.report.json")
    compared = instruction_seconds.compare(traced, llama.scopes.main_attribution(), report)
    more = sum(measured for measured, _ in sums(compared.by_kind).values())
    more -= sum(measured for measured, _ in sums(llama.comparison.by_kind).values())
    assert more == pytest.approx(traced.seconds(7 * 10**9))


def test_the_report_of_another_program_is_not_compared(llama):
    other = report_record.load(TRACES / f"{OFFLOAD}.report.json")
    attribution = llama.scopes.main_attribution()
    assert instruction_seconds.compare(llama.breakdown, attribution, other) is None
    without = dataclasses.replace(other, schedule=())
    assert instruction_seconds.compare(llama.breakdown, attribution, without) is None


def test_the_command_compares_kinds(tmp_path, capsys):
    (tmp_path / "a.xplane.pb").write_bytes(gzip.decompress((TRACES / f"{LLAMA}.xplane.pb.gz").read_bytes()))
    out = tmp_path / "trace.json"
    assert main(["report", f"{TRACES / LLAMA}.report.json", f"--trace={tmp_path}", f"--json={out}"]) == 0
    text = capsys.readouterr().out
    assert "2 updates without numbers" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("products"))
    comparison = json.loads(out.read_text())["result"]["comparison"]
    kinds = {one["kind"]: one for one in comparison["by_kind"]}
    assert row[1] == f"{1e3 * kinds['products']['measured_seconds']:.3f}"
    assert row[2] == f"{1e3 * kinds['products']['predicted_seconds']:.3f}"
    assert len(comparison["instructions"]) > 150


def test_a_kernel_that_fits_nowhere_keeps_its_graph(llama):
    """A kernel of an unknown library between two aligned ones, where no call is left for it."""
    first = next(one for one in llama.trace.operations if one.kernel == "loop_cosine_sine_fusion_1")
    stray = dataclasses.replace(first, kernel="stray_gemm", start=first.stop, stop=first.stop + 1)
    named = kernel_owners.name_kernels(
        (*llama.trace.operations, stray), "jit_step", llama.scopes.main_attribution().module
    )
    assert [one.name for one in named if one.kernel == "stray_gemm"] == [first.name]
    assert Counter(one.name for one in named if one != stray) == Counter(one.name for one in llama.operations)


def test_missing_kernels_do_not_shift_the_others(llama):
    """The profiler drops events when its buffer is full: here every 50th kernel."""
    kept = [one for number, one in enumerate(llama.operations) if number % 50]
    events = {(one.start, one.kernel): one for one in llama.trace.operations}
    named = kernel_owners.name_kernels(
        [events[one.start, one.kernel] for one in kept], "jit_step", llama.scopes.main_attribution().module
    )
    wrong = [one for one, other in zip(named, kept, strict=True) if one.name != other.name]
    assert len(wrong) < 0.01 * len(kept)


def slots(*families):
    return [kernel_owners._Slot(f"{family}.{n}", family, frozenset()) for n, family in enumerate(families)]


def names(owners):
    return [owner and (owner.name, owner.continues_run) for owner in owners]


def test_kernels_of_a_call_follow_its_first():
    assign = kernel_owners._assign
    # A memset before each product, and the sum of a split reduction after the first.
    found = assign(["memset", "cublas", "cublas", "memset", "cublas"], slots("cublas", "cublas"))
    assert names(found) == [
        ("cublas.0", False),
        ("cublas.0", True),
        ("cublas.0", True),
        ("cublas.1", False),
        ("cublas.1", True),
    ]
    found = assign(["cudnn", "memset", "cudnn", "copy", "cublas"], slots("cudnn", "copy", "cublas"))
    assert names(found) == [
        ("cudnn.0", False),
        ("cudnn.0", True),
        ("cudnn.0", True),
        ("copy.1", False),
        ("cublas.2", False),
    ]
    assert names(assign(["cudnn"], slots("cublas", "copy"))) == [None]
    assert names(assign(["memset"], slots("copy"))) == [("copy.0", False)]
