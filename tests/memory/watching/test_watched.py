"""`memory.watch`: anyone's loop, with its memory predicted, measured, and explained where it runs out."""

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope import memory
from bytescope.memory.devices import live
from bytescope.memory.errors import ReportError
from bytescope.memory.records import report_record
from bytescope.memory.watching import reporting, watched

WIDTH = 64


def step(state, batch):
    h = jnp.tanh(batch @ state["w"])
    return {"w": state["w"] - h.sum()}, h.mean()


def arguments(rows=8):
    return {"w": jnp.ones((WIDTH, WIDTH))}, jnp.ones((rows, WIDTH))


@pytest.fixture
def told():
    return []


@pytest.fixture
def watch(tmp_path, told):
    """`watch` with its lines in `told` and its files in a folder of the test."""
    return lambda step, **options: watched.watch(step, folder=tmp_path, tell=told.append, **options)


def test_a_loop_runs_as_without_and_is_compared_each_n_calls(watch, told, monkeypatch):
    traced, asked = [], []
    monkeypatch.setattr(live, "free_host_bytes", lambda: asked.append(run.calls) or 0)

    def counted(state, batch):
        traced.append(batch.shape)
        return step(state, batch)

    plain, run = jax.jit(step), watch(counted, every=3, donate_argnums=0)
    assert isinstance(run, memory.Watched)
    (state, batch), (other, _) = arguments(), arguments()
    for _ in range(7):
        old = state
        state, loss = run(state, batch)
        other, expected = plain(other, batch)
        assert old["w"].is_deleted()
        np.testing.assert_array_equal(loss, expected)
    assert (run.calls, traced) == (7, [batch.shape])
    first, *compared = told
    assert first.startswith("counted: predicted ") and "fits" in first
    assert [line.partition(":")[0] for line in compared] == ["counted, call 3", "counted, call 6"]
    assert all("predicted" in line and "the process grew by" in line for line in compared)
    assert set(asked) == {1}  # no line shows the host's limit, and reading it takes most of a sample's time
    assert run.report.xla.argument_bytes == 4 * (WIDTH * WIDTH + 8 * WIDTH)


def test_other_shapes_and_static_values_compile_again_and_are_kept(watch, told):
    def scaled(state, batch, by, twice=False):
        return state["w"].sum() * by * (2 if twice else 1), batch.shape[0]

    run = watch(jax.jit(scaled, static_argnums=2, static_argnames="twice"), every=0)
    state, batch = arguments()
    calls = [
        ((state, batch, 2), {}),
        ((state, batch, 3), {}),
        ((state, batch[:4], 3), {}),
        ((state, batch, 2), {"twice": True}),
        ((state, batch, 2), {}),
    ]
    for args, kwargs in (*calls, *calls):
        found, rows = run(*args, **kwargs)
        assert float(found) == WIDTH * WIDTH * args[2] * (2 if kwargs else 1) and int(rows) == len(args[1])
    assert len(told) == 4, "a line for each that was compiled"
    assert told[-1].endswith("compiled for 4 kinds of arguments so far")


def test_other_shardings_compile_again(watch, told, devices):
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("data",))
    run = watch(step, every=0)
    state, batch = jax.device_put(arguments(), jax.sharding.NamedSharding(mesh, jax.P()))
    split = jax.device_put(batch, jax.sharding.NamedSharding(mesh, jax.P("data")))
    assert float(run(state, batch)[1]) == float(run(state, split)[1]) and len(told) == 2


def test_inside_of_another_transformation_the_step_is_traced(watch):
    run, (state, batch) = watch(step, every=0), arguments()
    first = jax.grad(lambda w: run({"w": w}, batch)[1])(state["w"])
    run(state, batch)
    np.testing.assert_array_equal(first, jax.grad(lambda w: run({"w": w}, batch)[1])(state["w"]))
    np.testing.assert_array_equal(jax.jit(run)(state, batch)[1], run(state, batch)[1])


def test_errors_of_the_step_are_its_own(watch, told):
    run, (state, batch) = watch(step, every=0), arguments()
    run(state, batch)
    with pytest.raises(TypeError, match="dot_general"):  # not "compiled for other shapes"
        run(state, batch[:, :5])
    with pytest.raises(KeyError):
        run({}, batch)
    donated = watch(step, every=0, donate_argnums=0)
    donated(state, batch)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        donated(state, batch)
    assert not donated.post_mortem


def test_a_step_that_cannot_be_read_runs_as_it_is(watch, told, monkeypatch):
    monkeypatch.setattr(watched, "report_of", lambda *args, **options: 1 // 0)
    run, (state, batch) = watch(step, every=1), arguments()
    assert float(run(state, batch)[1]) == float(step(state, batch)[1])
    monkeypatch.setattr(watched, "compile_jitted", lambda *args: 1 // 0)
    bare = watch(jax.jit(step), every=1)
    assert float(bare(state, batch)[1]) == float(bare(state, batch)[1])
    assert told == ["step is called without a watch: ZeroDivisionError: integer division or modulo by zero"] * 2
    assert run.report is None and bare.compiled is None


class Flat:
    """A step in somebody's own kind of jit, whose executable does not look at what is static, as equinox' does not."""

    def __call__(self, x, by):
        return x * by

    def lower(self, x, by):
        lowered = jax.jit(lambda x: x * by).lower(x)
        return types.SimpleNamespace(lowered=lowered, compile=lambda: None)


def test_static_values_of_a_wrapper_are_looked_at_each_call(watch, told, monkeypatch):
    monkeypatch.setattr(
        "bytescope.memory.watching.executable._with_library_arguments",
        lambda lowered, executable: lambda x, by: executable(x),
    )
    run = watch(Flat(), every=0)
    assert [float(run(jnp.ones(4), by)[0]) for by in (2.0, 3.0, 2.0)] == [2.0, 3.0, 2.0] and len(told) == 2


# ---- without memory --------------------------------------------------------------------------------------------------


def check(text, folder, words):
    """What holds for every post-mortem: on a screen, with what was asked for, and written."""
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100, text
    text = " ".join(text.split())
    for word in ("out of memory in step, call", reporting.EXHAUSTED, "other arrays", "in use", "1. ", *words):
        assert word in text, text
    page = (folder / "memory-post-mortem.html").read_text()
    assert "ran out of memory at call" in page and "What to do" in page and 'id="explained-buffers"' in page
    written = json.loads((folder / "memory-post-mortem.json").read_text())
    assert {"step", "held", "allocator", "error"} <= set(written["post_mortem"])
    return report_record.load(folder / "memory-post-mortem.json")


def test_a_limit_fails_as_a_device_does_and_the_original_error_is_raised(watch, told, tmp_path):
    kept = [jnp.ones((300, 1000)) for _ in range(3)]
    run, (state, batch) = watch(step, budget="1KiB"), arguments()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED: .* more than budget=1.00 KiB") as caught:
        run(state, batch)
    report = check(told[-1], tmp_path, [f"{len(kept)} x float32[300,1000] 3.43 MiB", "too much", "Delete "])
    assert (report.limit_bytes, report.fits) == (1024, False)
    found = run.post_mortem
    assert found.explanation is not None and found.explanation.recognized
    group = next(group for group in found.held if group.shape == (300, 1000))
    assert (group.arrays, group.others, group.other_bytes) == (3, 3, 3 * 1200000)
    own = [group for group in found.held if group.shape == (WIDTH, WIDTH)]
    assert sum(group.arrays - group.others for group in own) == 1, "the step's own argument is one"
    assert found.needed_bytes == report.predicted_bytes + found.other_bytes
    assert len(told) == 1, "nothing says that it fits"
    assert any("memory-post-mortem.html" in note for note in caught.value.__notes__)
    assert watch(step, budget="1GiB")(state, batch)


def test_a_program_that_the_cpu_has_no_memory_for(watch, told, tmp_path):
    def huge(x):
        wide = jax.lax.broadcasted_iota(jnp.float32, (2**24, 2**22), 0) * x.sum()
        return jnp.tanh(jnp.cos(wide) @ jnp.sin(wide.T))[0, 0]

    huge.__name__ = "step"
    run = watch(huge)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: Out of memory allocating"):
        run(jnp.ones(8))
    report = check(told[-1], tmp_path, ["test_watched.py", "in parts"])
    assert report.predicted_bytes > 2**46


def test_arrays_are_counted_once_on_the_device_that_they_are_on(devices):
    mesh = jax.sharding.Mesh(np.array(devices[:4]), ("data",))
    split = jax.device_put(jnp.ones((1028, 3)), jax.sharding.NamedSharding(mesh, jax.P("data")))
    whole = jax.device_put(jnp.ones((1029, 3)), jax.sharding.NamedSharding(mesh, jax.P()))
    elsewhere, key = jax.device_put(jnp.ones((1030, 3)), devices[5]), jax.random.key(3)
    parts = [shard.data for shard in (*split.addressable_shards, *whole.addressable_shards)]
    held = {group.shape: group for group in reporting.held_arrays(devices[1], [split, key]) if sum(group.shape) > 1020}
    assert {shape: (group.arrays, group.bytes, group.others) for shape, group in held.items()} == {
        (1028, 3): (1, 257 * 3 * 4, 0),
        (1029, 3): (1, 1029 * 3 * 4, 1),
    }
    assert parts and elsewhere.size
    given, bare = (
        next(group.others for group in reporting.held_arrays(devices[0], leaves) if group.name == "uint32[2]")
        for leaves in ([key], [])
    )
    assert bare == given + 1, "what a key lies in is an argument"
    of_shapes = reporting.held_arrays(devices[1], [jax.ShapeDtypeStruct(whole.shape, whole.dtype)])
    assert next(group for group in of_shapes if group.shape == whole.shape).others == 0


NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes."


def raising(x):
    """A step that runs out of memory where its argument is not zero, in the middle of what it computes."""

    def fail(x):
        if x.sum() > 0:
            raise RuntimeError(NO_MEMORY)
        return x

    return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1


def test_an_error_of_a_later_call(watch, told, tmp_path):
    raising.__name__ = "step"
    run = watch(jax.jit(raising), every=0)
    run(jnp.zeros(4))
    with pytest.raises(jax.errors.JaxRuntimeError, match="12884901888"), run as inside:
        jax.block_until_ready(inside(jnp.ones(4)))
    check(told[-1], tmp_path, ["call 2", NO_MEMORY])
    assert len(told) == 2, "once, wherever it passes"


def test_an_error_that_comes_when_results_are_read(watch, told, tmp_path):
    """The arguments are gone then: as many arrays of their shapes are the step's."""
    run, (state, batch) = watch(step, every=0), arguments()
    with pytest.raises(jax.errors.JaxRuntimeError, match="12884901888"), run as inside:
        inside(state, batch)
        raise jax.errors.JaxRuntimeError(NO_MEMORY)  # as float(loss) would
    check(told[-1], tmp_path, ["call 1", NO_MEMORY])
    own = next(group for group in run.post_mortem.held if group.shape == (WIDTH, WIDTH))
    assert own.arrays - own.others == 1 and len(told) == 2
    with pytest.raises(KeyError), run:
        raise KeyError("another")
    assert len(told) == 2


def test_a_compiler_without_memory_has_no_report(watch, told, tmp_path):
    def step(state, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes")

    run = watch(step)
    with pytest.raises(jax.errors.JaxRuntimeError):
        run(*arguments())
    assert run.post_mortem.report is None and "live arrays" in told[-1]
    assert 'id="explained-buffers"' in (tmp_path / "memory-post-mortem.html").read_text()
    assert (tmp_path / "memory-post-mortem.json").exists()


def test_a_folder_that_cannot_be_written_hides_no_error(told, tmp_path):
    (tmp_path / "file").write_text("")
    run = watched.watch(step, folder=tmp_path / "file" / "in", tell=told.append, budget="1B")
    with pytest.raises(jax.errors.JaxRuntimeError, match="budget=1 B"):
        run(*arguments())
    assert "written: memory" not in told[-1] and "other arrays" in told[-1]
    assert told[-1].endswith(f"not written: {tmp_path / 'file' / 'in'} is not writable; give watch(..., folder=DIR)")


def test_an_error_that_nobody_catches_is_explained():
    code = f"""
import jax, jax.numpy as jnp
from bytescope import memory
def step(x):
    return x + 1
step = memory.watch(step, every=0, folder="/dev/null/no")
step(jnp.zeros(4))
raise jax.errors.JaxRuntimeError({NO_MEMORY!r})
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "Traceback" in ended.stderr and NO_MEMORY in ended.stderr
    assert ended.stdout.count("out of memory in step, call 1") == 1, ended.stdout + ended.stderr


@pytest.mark.quick
def test_what_the_line_is_compared_with(monkeypatch, tmp_path):
    """The process holds the step's arguments when it is first called: they are part of what is predicted. A peak from
    before the loop is none of the step's."""
    compared = []
    monkeypatch.setattr(live, "predicted_against_measured", lambda *given: compared.append(given) or "")
    report = report_record.ReportRecord(0, 0, {}, xla=report_record.XlaStats(argument_bytes=300))
    for source, first, peak in (("host", 400, 1200), ("allocator", 1000, 9000)):
        reporter = reporting.StepReporter("step", lambda line: None, tmp_path)
        for sample in (
            live.LiveMemory("cpu", source, sharing=2, in_use_bytes=1000, peak_bytes=9000),
            live.LiveMemory("cpu", source, sharing=2, in_use_bytes=1200, peak_bytes=9000),
            live.LiveMemory("cpu", source, sharing=2, in_use_bytes=1200, peak_bytes=9500),
        ):
            monkeypatch.setattr(live, "sample", lambda device, host_limit=True, sample=sample: sample)
            reporter.begin(None, report)
            reporter.report_measured(report, None, 1)
        figures = [(sample.peak_bytes, before.in_use_bytes) for _, sample, before in compared[-2:]]
        assert figures == [(peak, first), (9500, first)]


@pytest.mark.quick
def test_mistakes_are_named():
    with pytest.raises(ReportError, match="every=-1"):
        watched.watch(step, every=-1)
    with pytest.raises(ReportError, match="is not a valid size"):
        watched.watch(step, budget="many")
    with pytest.raises(ReportError, match="an int is not a step"):
        watched.watch(3)
    with pytest.raises(ReportError, match="donate_argnums cannot be set for a step that is jitted already"):
        watched.watch(jax.jit(step), donate_argnums=0)
    with pytest.raises(
        TypeError, match=r"watch\(\) got the unknown option target: give only options of jax.jit, in_shardings, "
    ):
        watched.watch(step, target="h200")
    with pytest.raises(ReportError, match="roles="):
        watched.watch(step, roles={"state": "params"})

    @watched.watch(every=5)
    def decorated(x):
        """Its words."""

    assert decorated.__doc__ and decorated.__wrapped__.__doc__ == "Its words." and decorated.calls == 0
