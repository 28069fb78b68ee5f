"""Traces of hand-made events: who has which moment, what a GPU's planes hold, and files that are none."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescope.memory.__main__ import main
from bytescope.memory.devices.compiler import compile_lowered
from bytescope.memory.hlo.wire import WireError
from bytescope.memory.profile import breakdown, xplane
from bytescope.memory.profile.breakdown import divide, host_rows, innermost_spans
from bytescope.memory.profile.op_scopes import OpScope, OpScopes
from bytescope.memory.profile.xplane import Operation, ProfilerTrace, Span
from support.formats import Plane, gpu_space

pytestmark = pytest.mark.quick

PROGRAM = (7, "jit_step")
PLACES = {
    "a": OpScope("forward", "mlp"),
    "b": OpScope("backward", "mlp"),
    "c": OpScope("backward", "collectives"),
    "t": OpScope("other", "transfers"),
    "w": OpScope("forward", "loops", opcode="while"),
}


def operation(name, start, stop, device="0"):
    return Operation(device, name, name, PROGRAM, start, stop)


def shares(*operations, start=0, stop=100):
    """Instruction -> its share; intervals of nothing; what was hidden."""
    found, idle, hidden = divide([operation(*each) for each in operations], lambda key: PLACES[key[1]], start, stop)
    return {key[1]: taken for key, taken in found.items()}, idle, dict(hidden)


@pytest.mark.parametrize(
    ("events", "taken", "idle", "hidden"),
    [
        ([("a", 0, 100)], {"a": 100}, [], {}),
        ([("a", 10, 60), ("b", 30, 80)], {"a": 35, "b": 35}, [(0, 10), (80, 100)], {}),
        # Three threads of one instruction are that instruction; what cannot be divided goes to the first.
        ([("a", 0, 50), ("a", 0, 50), ("a", 0, 50)], {"a": 50}, [(50, 100)], {}),
        ([("a", 0, 51), ("b", 0, 51)], {"a": 26, "b": 25}, [(51, 100)], {}),
        ([("a", 5, 5)], {}, [(0, 100)], {}),
        # A loop has what its instructions leave; collectives and transfers have what compute leaves.
        ([("w", 0, 100), ("a", 10, 40), ("b", 50, 90)], {"w": 30, "a": 30, "b": 40}, [], {}),
        (
            [("a", 0, 40), ("c", 20, 70), ("t", 30, 90)],
            {"a": 40, "c": 30, "t": 20},
            [(90, 100)],
            {"collectives": 20, "transfers": 40},
        ),
    ],
)
def test_a_moment_is_divided_between_all_that_run_in_it(events, taken, idle, hidden):
    assert shares(*events) == (taken, idle, hidden)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(sorted(PLACES)), st.integers(0, 90), st.integers(0, 60))))
def test_shares_and_idle_are_the_time_whatever_runs(events):
    taken, idle, hidden = shares(*((name, start, start + length) for name, start, length in events), stop=160)
    running = {at for _, start, length in events for at in range(start, start + length)}
    assert sum(taken.values()) == len(running)
    assert {at for low, high in idle for at in range(low, high)} == set(range(160)) - running
    assert min([0, *taken.values(), *hidden.values()]) == 0


def test_host_work_is_of_the_inmost_annotation_and_adds_up():
    spans = [
        Span("host/data", "main", 10, 50),
        Span("host/put", "main", 20, 30),
        Span("host/put", "main", 30, 35),
        Span("host/metrics", "main", 60, 120),
        Span("update", "main", 0, 100, 1),
    ]
    assert list(innermost_spans(spans[:3])) == [
        ("host/data", 10, 20),
        ("host/put", 20, 30),
        ("host/put", 30, 35),
        ("host/data", 35, 50),
    ]
    rows = host_rows(spans, [[(0, 40)], [(80, 100)]], 0, 100)
    assert [(row.name, row.taken, row.idle, row.count) for row in rows] == [
        ("metrics", 40, 10, 1),
        ("data", 25, 7, 1),
        ("put", 15, 7, 2),
        ("launch and other", 20, 6, 0),
    ]


def test_an_evaluation_among_the_updates_is_not_the_program():
    """However long it runs: the calls per update and the roofline are of the step."""
    longer = Operation("0", "e", "e", (8, "jit_eval_step"), 20, 90)
    trace = ProfilerTrace(
        (operation("a", 0, 10), longer), (Span("update", "main", 0, 95, 1), Span("host/evaluation", "main", 15, 95))
    )
    assert breakdown.find(trace).program == "jit_step"
    assert breakdown.find(ProfilerTrace((longer,), trace.spans)).program == "jit_eval_step"  # and nothing else ran


@pytest.fixture(scope="module")
def proto():
    """The HloProto of a scan with named scopes and its gradient."""

    def step(w, x):
        def layer(carry, w):
            with jax.named_scope("mlp"):
                return jnp.tanh(carry @ w), None

        y, _ = jax.lax.scan(layer, x, w)
        with jax.named_scope("loss"):
            return jnp.sum(y**2)

    shapes = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32), jax.ShapeDtypeStruct((4, 16), jnp.float32)
    return compile_lowered(jax.jit(jax.grad(step)).lower(*shapes)).proto


@pytest.fixture(scope="module")
def named(proto):
    """Names of a product of the backward pass's mlp and of a fusion of the forward pass."""
    found = xplane.parse(gpu_space(proto, {"dot": "-", "fusion": "-"}))
    module = OpScopes(found)._find_module(PROGRAM)
    names = {module.scope(each): each.name for each in module.attribution.module.of_opcode("dot", "fusion")}
    backward = next(
        name
        for place, name in names.items()
        if place.phase == "backward" and place.component == "mlp" and place.opcode == "dot"
    )
    forward = next(
        name
        for place, name in names.items()
        if place.phase == "forward" and place.opcode == "fusion" and place.component in ("mlp", "loss")
    )
    return {"dot": backward, "fusion": forward}


def test_a_gpu_trace(proto, named, tmp_path, capsys):
    path = tmp_path / "plugins" / "profile" / "now" / "card.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(gpu_space(proto, named))
    found = breakdown.find(xplane.read(xplane.find(tmp_path)))
    # From 500 ps of the update's start to the last copy's end, at 1 ns + 1000 ps.
    assert (found.program, found.steps, found.devices, found.wall) == ("jit_step", (4,), 1, 1500)
    component = OpScopes(xplane.parse(gpu_space(proto, named))).scope((PROGRAM, named["fusion"], "")).component
    assert found.cells == {
        ("backward", "mlp"): 600,
        ("other", "collectives"): 100,
        ("other", "transfers"): 200,
        ("forward", component): 100,
    }
    assert (found.busy, found.idle, found.hidden) == (1000, 500, {"collectives": 100, "transfers": 200})
    product = next(row for row in found.instructions if row.name == named["dot"])
    assert (product.count, product.taken, product.scope.opcode) == (2, 600, "dot")
    assert [(row.name, row.taken, row.idle) for row in found.host] == [
        ("launch and other", 1100, 100),
        ("wait_for_data", 400, 400),
    ][::-1]
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        "update 4 · 1 device · us per update" in out
        and "transfers hidden behind compute" in out
        and named["dot"] in out
    )


def test_operations_without_a_module_are_of_their_own_words():
    operations = [
        Operation("0", "fusion.1", "k", (None, ""), 0, 10, "jit(f)/transpose(jvp(blocks))/attention/mul"),
        Operation("0", "", "unknown_kernel", (None, ""), 10, 30),
    ]
    found = breakdown.find(ProfilerTrace(tuple(operations)))
    assert found.cells == {("backward", "attention"): 10, ("other", "other"): 20}
    assert (found.steps, found.updates, found.wall) == ((), 1, 30)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_traces_are_records_or_one_error(at, value):
    host = Plane("/host:CPU")
    host.line(
        "python",
        1,
        ("update", 5, 9, {"step_num": 1}),
        ("x", 5, 9, {"hlo_op": "&x", "_p": 3}),
        ("end: x", 9, 9, {"_c": 3}),
        ("host/data", 1, 2, {}),
    )
    data = bytearray(host.bytes())
    data[at % len(data)] = value
    try:
        found = xplane.parse(bytes(data))
    except WireError as error:  # any other kind of error fails the test
        assert str(error)
    else:
        assert len(found.operations) <= 2 and len(found.spans) <= 4 and not found.programs
        assert all(isinstance(run.start, int) and run.start <= run.stop for run in (*found.operations, *found.spans))


def test_mistakes_are_one_line(tmp_path, capsys):
    empty, many = tmp_path / "empty", tmp_path / "many"
    empty.mkdir()
    many.mkdir()
    for name in ("a", "b"):
        (many / f"{name}.xplane.pb").write_bytes(b"")
    (tmp_path / "text.xplane.pb").write_text("not a trace at all")
    for flags, message in (
        (["a.json", f"--trace={empty}"], "no *.xplane.pb in"),
        (["a.json", f"--trace={tmp_path / 'nowhere'}"], "there is no file or folder"),
        ([str(many)], "contains 2 traces"),
        ([str(tmp_path / "text.xplane.pb")], "is not a profiler trace"),
        ([str(many / "a.xplane.pb")], "contains no device operations"),
        ([str(many), "--config.seed=1"], "takes no --config.seed"),
    ):
        assert main(["report", *flags]) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1
