"""`memory.compile`: the executable and its report from one compile, called as the step is."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope import memory
from bytescope.memory.errors import ReportError
from bytescope.memory.watching import executable
from support.oracles import require


@pytest.fixture
def compiles(monkeypatch):
    """How often anything was compiled: one entry a compile."""
    done, real = [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *args, **how: done.append(1) or real(*args, **how))
    return done


def step(state, batch, *, causal=True):
    """A step with state in a pytree, a keyword that is static, and a result that tells it."""
    loss = (batch["x"] @ state["w"]).sum() * (2.0 if causal else 1.0)
    return {"w": state["w"] - loss}, loss


def arguments():
    return {"w": jnp.ones((16, 8))}, {"x": jnp.ones((4, 16))}


def test_one_compile_gives_the_executable_and_its_report(compiles):
    state, batch = arguments()
    run, report = memory.compile(step, state, batch, donate_argnums=0)
    assert isinstance(run, memory.Executable) and isinstance(report, memory.Report)
    assert report.xla.argument_bytes == 4 * (16 * 8 + 4 * 16)
    expected = step(*arguments())
    new, loss = run(state, batch)
    np.testing.assert_array_equal(loss, expected[1])
    np.testing.assert_array_equal(new["w"], expected[0]["w"])
    assert state["w"].is_deleted() and not batch["x"].is_deleted(), "what the step donates is donated, and no more"
    run(new, batch)
    assert len(compiles) == 1
    assert run.memory_analysis().argument_size_in_bytes == report.xla.argument_bytes, "all else is the Compiled's"


def test_static_arguments_are_given_as_to_the_step(compiles):
    state, batch = arguments()
    run, _ = executable.compile(jax.jit(step, static_argnames="causal"), state, batch, kwargs={"causal": False})
    assert float(run(state, batch, causal=False)[1]) == 4 * 16 * 8
    with pytest.raises(TypeError, match="static arguments causal=False, but is called with causal=True"):
        run(state, batch, causal=True)
    with pytest.raises(TypeError):
        run(state, {"x": jnp.ones((5, 16))}, causal=False)
    by_place, _ = executable.compile(lambda n, x: x * n, 3, jnp.ones(4), static_argnums=0)
    assert float(by_place(3, jnp.ones(4))[0]) == 3.0
    with pytest.raises(TypeError, match=r"args\[0\]=3, but is called with args\[0\]=2"):
        by_place(2, jnp.ones(4))
    assert len(compiles) == 2


def test_a_step_without_arguments():
    run, _ = executable.compile(lambda: jnp.arange(4) * 2)
    np.testing.assert_array_equal(run(), [0, 2, 4, 6])


def test_for_a_described_target_the_executable_says_that_it_cannot_run():
    require("cuda")
    run, report = executable.compile(step, *arguments(), target="h200")
    assert report.target["name"] == "h200" and report.fits
    with pytest.raises(ReportError, match="compiled for h200, which is not present: it cannot run"):
        run(*arguments())
    run, same = executable.compile(Around(jax.jit(step)), *arguments(), target="h200")
    assert same.peak_bytes == report.peak_bytes and same.target["name"] == "h200"
    with pytest.raises(ReportError, match="cannot run"):
        run(*arguments())


class Around:
    """A step whose stages are around those of jax, as flax has them."""

    def __init__(self, inside):
        self.inside = inside

    def __call__(self, *args):
        return self.inside(*args)

    def trace(self, *args):
        traced = self.inside.trace(*args)
        return SimpleNamespace(traced=traced, lower=lambda: Staged(traced.lower()))

    def lower(self, *args):
        return self.trace(*args).lower()


@dataclasses.dataclass(frozen=True)
class Staged:
    """A stage as equinox and flax have theirs, around one of jax: it unpacks what it is called with."""

    lowered: object

    def compile(self):
        inside = self.lowered.compile()
        return lambda state, batch: inside(batch["x"], state["w"])


class Wrapper:
    """A step in somebody's own kind of jit, which takes pytrees apart."""

    def __init__(self, function):
        self.inside = jax.jit(lambda x, w: function({"w": w}, {"x": x}))

    def __call__(self, state, batch):
        return self.inside(batch["x"], state["w"])

    def lower(self, state, batch):
        return Staged(self.inside.lower(batch["x"], state["w"]))


def test_a_wrapper_of_jit_is_called_as_it_wants_to_be(compiles):
    run, report = executable.compile(Wrapper(step), *arguments())
    assert float(run(*arguments())[1]) == 2 * 4 * 16 * 8 and report.peak_bytes
    assert len(compiles) == 1


def test_mistakes_are_named():
    with pytest.raises(TypeError, match=r"compile\(\) got the unknown option donate"):
        executable.compile(step, *arguments(), donate=0)
    with pytest.raises(ReportError, match="is not a step"):
        executable.compile(jax.jit(step).lower(*arguments()))
    with pytest.raises(ReportError, match="donate_argnums cannot be set for a step that is jitted already"):
        executable.compile(jax.jit(step), *arguments(), donate_argnums=0)
    assert not hasattr(executable.Executable(SimpleNamespace(), len), "no_such_thing")
