"""Reports of real programs: rows add up to the byte, and every byte is what it says."""

import dataclasses
import functools
import json

import jax
import numpy as np
import optax
import pytest

from bytescope import memory
from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.devices.compiler import compile_lowered
from bytescope.memory.hlo import buffers as hlo_buffers
from bytescope.memory.program import compilation as program
from bytescope.memory.records.report_record import ROWS
from support import programs
from support.exhaustive import exhaustive
from support.oracles import require

PARAMETERS = sum(leaf.size for leaf in jax.tree.leaves(programs.parameters()))


def check(report):
    """What holds for every report there is."""
    rows = report.breakdown
    assert tuple(rows) == ROWS
    assert min(rows.values()) >= 0
    assert sum(rows.values()) == report.allocated_bytes
    assert sum(rows.values()) - rows["fragmentation"] == report.peak_bytes
    assert memory.Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    if report.method == "heap_trace":
        assert max(point.bytes for point in report.timeline) == report.peak_bytes
        assert report.timeline[report.peak_index].bytes == report.peak_bytes
        assert sum(report.residuals_by_name.values()) == rows["residuals"]
        assert sum(report.workspace_by_scope.values()) == rows["workspace"]
        for point in report.timeline:
            assert sum(b.bytes for b in report.alive_at(point.index)) == point.bytes


@pytest.fixture(scope="module")
def gpu():
    """One described H200."""
    require("cuda")
    return targets.parse("h200").devices()


@pytest.fixture(scope="module")
def traced_for_gpu(gpu):
    """Policy -> the training step traced for the H200, once; what is lowered alike is compiled once."""
    known = {}

    def compiled(lowered, device_memory_bytes=None, **fields):
        text = lowered.as_text(debug_info=True)
        if text not in known:
            known[text] = compile_lowered(lowered, device_memory_bytes=device_memory_bytes)
        return dataclasses.replace(known[text], **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "compile_lowered", compiled)
        yield functools.cache(lambda policy: programs.trace_step(gpu, policy))


@pytest.fixture(scope="module")
def subject(training_step):
    """The training step on the CPU, with its compilation."""
    traced, compilation = training_step
    return traced, compilation, report_of(compilation)


def test_training_step_adds_up(subject):
    _, compilation, report = subject
    check(report)
    assert report.method == "heap_trace"
    assert report.breakdown["unattributed"] < 0.02 * report.peak_bytes
    stats = compilation.compiled.memory_analysis()
    assert report.xla.temp_bytes == stats.temp_size_in_bytes
    constants = sum(a.size for a in hlo_buffers.read(compilation.proto).allocations if a.constant)
    assert report.allocated_bytes == constants + (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )


def test_arguments_are_split_by_path(subject):
    _, _, report = subject
    assert report.breakdown["params"] == 4 * PARAMETERS
    assert report.breakdown["optimizer"] == 8 * PARAMETERS + 4 + 4  # Adam's count and the step
    assert report.breakdown["batch"] == 2 * 4 * programs.BATCH * programs.LENGTH
    assert report.breakdown["outputs"] < 1024  # the state is donated: only the loss and tables go out


def test_phases_come_in_order(subject):
    phases = [point.phase for point in subject[2].timeline]
    assert phases[0] == "argument"
    assert phases.index("forward") < phases.index("recompute") < len(phases) - 1
    assert "optimizer" in phases[phases.index("backward") :]


def test_source_lines_are_the_users(subject):
    sources = {b.source.rpartition("/")[2].partition(":")[0] for b in subject[2].buffers if b.source}
    assert "programs.py" in sources
    assert not any("/jax/_src/" in b.source for b in subject[2].buffers)


@pytest.mark.parametrize("policy", ["named", *exhaustive("none", "full")])
def test_described_gpu(traced_for_gpu, policy):
    report = memory.analyze(traced_for_gpu(policy), target="h200")
    check(report)
    assert report.breakdown["unattributed"] < 0.02 * report.peak_bytes
    assert report.xla.peak_bytes == report.peak_bytes
    assert report.fits and report.verdict == "fits" and report.target["name"] == "h200"
    tokens = programs.LAYERS * programs.BATCH * programs.LENGTH * 2
    named = {"q": tokens * programs.WIDTH, "attn_out": tokens * programs.WIDTH, "up": tokens * programs.HIDDEN}
    found = {name: size for name, size in report.residuals_by_name.items() if not name.startswith("(")}
    if policy == "full":
        assert found == {} and report.residuals_by_name["(blocks input)"] == tokens * programs.WIDTH
    if policy == "named":
        assert found == named


def test_names_without_a_jaxpr_come_from_the_source(traced_for_gpu):
    report = memory.analyze(traced_for_gpu("named").lower())
    assert set(programs.NAMES) <= set(report.residuals_by_name)
    assert report.target["name"] == "h200" and report.fits  # the devices that it was lowered for


def test_ledger_is_sixteen_bytes(traced_for_gpu):
    report = memory.analyze(traced_for_gpu("full"))
    rows = {(row.role, row.dtype): row.bytes_per_param for row in report.ledger}
    assert rows["params", "float32"] == 4.0
    assert rows["optimizer", "float32"] == 8.0
    assert rows["gradients", "float32"] == pytest.approx(4.0, rel=0.25)
    assert report.ledger[-1].role == "total"
    assert report.ledger[-1].bytes == sum(row.bytes for row in report.ledger[:-1])


def test_multisteps_accumulator_is_a_row(devices):
    steps = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)
    report = memory.analyze(programs.trace_step(devices[:1], optimizer=steps))
    check(report)
    assert report.breakdown["accumulator"] == 4 * PARAMETERS
    assert report.breakdown["params"] == 4 * PARAMETERS


def test_accumulator_of_a_scan_is_a_row(gpu):
    report = memory.analyze(programs.trace_step(gpu, micro=2))
    check(report)
    stacked = sum(leaf.size for leaf in jax.tree.leaves(programs.parameters()["blocks"]))
    assert report.breakdown["accumulator"] >= 4 * stacked


def test_sharded_state_gathers_and_divides(fully_sharded):
    report = report_of(fully_sharded)
    check(report)
    assert report.breakdown["params"] < 4 * PARAMETERS / 7
    assert any(b.category == "collectives" for b in report.buffers)


def test_compiled_derives_lifetimes_and_says_so(subject):
    traced, _, exact = subject
    report = memory.analyze(traced.lower().compile())
    check(report)
    assert report.method == "schedule"
    assert "derived" in report.notes[0]
    assert report.allocated_bytes == exact.allocated_bytes
    assert report.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.05)


def test_compiled_gpu_has_xlas_peak(traced_for_gpu):
    traced = traced_for_gpu("named")
    exact, derived = memory.analyze(traced), memory.analyze(traced.lower().compile())
    check(derived)
    assert (derived.method, derived.peak_bytes) == ("schedule", exact.peak_bytes)
    assert derived.breakdown["residuals"] == exact.breakdown["residuals"]
    assert derived.breakdown["unattributed"] < 0.05 * derived.peak_bytes
    assert "not_donated" not in {finding.kind for finding in derived.findings}


# What the code of programs without scopes is called by: functions, classes of modules, lines of lambdas.
COMPONENTS = {
    "linen": {"mlp", "step()"},
    "scan": {"scan()"},
    "convolution": {"loss()"},
    "two_scans": {"outer()", "two_scans()"},
    "identity": set(),
}


@pytest.mark.parametrize("name", programs.OTHERS)
def test_other_programs(name):
    lowered = programs.OTHERS[name]()
    exact, derived = memory.analyze(lowered), memory.analyze(lowered.compile())
    check(exact)
    check(derived)
    made = [b for b in exact.buffers if b.at_peak and b.phase != "argument" and b.shape]
    # A jitted function of jax that another program called first keeps the lines of that call.
    own = [b for b in made if b.component != "argument_copy" and b.op_name.count("jit(") < 2]
    assert {b.source.rpartition("/")[2].partition(":")[0] for b in own} <= {"programs.py"}, "lines of the program"
    found = {b.component for b in own} - {"constants", "param_copy"}
    assert found <= COMPONENTS.get(name, found) and all(map(str.strip, found))
    assert exact.unplaced_bytes <= 8 * 16, "tables of tuples at most"


def test_host_memory_is_apart(gpu):
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(gpu), ("d",)), jax.sharding.PartitionSpec())
    shape = jax.ShapeDtypeStruct((256, 256), np.float32, sharding=place)

    def step(params, moments):
        new = jax.device_put(moments, jax.memory.Space.Device) * 0.9 + params
        return params - new, jax.device_put(new, jax.memory.Space.Host)

    report = memory.analyze(jax.jit(step, donate_argnums=(0, 1)).lower(shape, shape))
    check(report)
    assert report.host_bytes == 4 * 256 * 256
    assert all(b.bytes for b in report.buffers if b.memory == "host")


def test_roles_of_ones_own(devices):
    lowered = jax.jit(lambda one, two: one @ two).lower(*[jax.ShapeDtypeStruct((8, 8), np.float32)] * 2)
    assert memory.analyze(lowered).breakdown["batch"] == 2 * 256
    assert memory.analyze(lowered, roles=[("one", "params")]).breakdown["params"] == 256


@pytest.mark.quick
@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ([("one", "weights")], "role 'weights' for 'one' is unknown: choose one of accumulator, "),
        ([("one", "param")], "role 'param' for 'one' is unknown: did you mean params"),
        ([("(", "params")], "roles: '(' is not a regular expression: "),
        ({"one": "params"}, "roles={'one': 'params'} is not a list of pairs: give (regular expression, role) pairs"),
        ("params", "roles='params' is not a list of pairs: give (regular expression, role) pairs"),
        ([1], "roles=[1] is not a list of pairs: give (regular expression, role) pairs"),
    ],
)
def test_roles_that_are_none_are_told_before_anything_is_compiled(roles, told):
    with pytest.raises(memory.ReportError) as caught:
        memory.analyze(lambda one: pytest.fail("traced"), np.ones(3), roles=roles)
    assert told in str(caught.value)


@pytest.mark.quick
def test_the_text_of_a_program_is_no_path():
    with pytest.raises(memory.ReportError) as caught:
        memory.analyze("HloModule jit_f, is_scheduled=true\n" * 100)
    assert str(caught.value).startswith(
        "the program is given as HLO text, which does not contain buffers: give the Compiled or Lowered object, "
    )


def test_proto_by_path_and_bytes(subject, tmp_path):
    _, compilation, report = subject
    path = tmp_path / "step.after_optimizations.hlo.pb"
    path.write_bytes(compilation.proto)
    for given in (path, str(path), compilation.proto):
        read = memory.analyze(given)
        assert (read.peak_bytes, read.breakdown) == (report.peak_bytes, report.breakdown)
        assert read.xla.temp_bytes == report.xla.temp_bytes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *((given, "is not a program: give") for given in (None, 3, object())),
        (lambda x: x, "without its arguments: give"),
    ],
)
def test_what_is_no_program(given, words):
    with pytest.raises(memory.ReportError, match=words):
        memory.analyze(given)


def test_missing_file(tmp_path):
    with pytest.raises(memory.ReportError, match="no file"):
        memory.analyze(tmp_path / "nothing.pb")


def test_a_proto_without_buffers_is_derived(subject):
    module = subject[1].compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    size, head = len(module), b"\x0a"
    while size > 127:
        head, size = head + bytes([size & 127 | 128]), size >> 7
    proto = head + bytes([size]) + module
    assert hlo_buffers.read(proto).module.name == "jit_step"
    report = memory.analyze(proto)
    check(report)
    assert report.method == "schedule"
