"""Steps as people have them: arguments that are no arrays, wrappers of jit, objects of libraries, pmap."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from bytescope import memory
from bytescope.memory.program import tracing

pytestmark = pytest.mark.quick

spec = jax.ShapeDtypeStruct
X, W = spec((4, 8), jnp.float32), spec((8, 8), jnp.float32)


@dataclasses.dataclass
class Config:
    scale: float = 3.0


def step(params, x, config, mode="tanh"):
    y = params["act"](x @ params["w"]) * config.scale
    return {"y": jnp.tanh(y) if mode == "tanh" else y, "mode": mode, "act": params["act"]}


def names(program):
    return list(program.jaxpr.jaxpr.debug_info.arg_names)


def test_what_is_no_array_is_part_of_the_step():
    """Strings, functions and objects, in the arguments and in the results; paths stay, numbers are arguments."""
    params = {"w": W, "act": jax.nn.relu, "none": None}
    program = tracing.trace(step, (params, X, Config()), {"mode": "plain"}, {"donate_argnums": 1})
    assert names(program) == ["params['w']", "x"] and program.fun_name == "step"
    assert [leaf.donated for leaf in jax.tree.leaves(program.args_info)] == [False, True]
    assert [out.shape for out in program.jaxpr.out_avals] == [(4, 8)] and "tanh" not in str(program.jaxpr)
    scaled = tracing.trace(lambda x, by, name: x * by, (X, 3.0, "by"), {}, {})
    assert [aval.shape for aval in scaled.jaxpr.in_avals] == [(4, 8), ()]
    strings = np.array(["a", "b"])
    assert len(tracing.trace(lambda x, words: x * len(words), (X, strings), {}, {}).jaxpr.in_avals) == 1


@pytest.mark.parametrize("options", [{"static_argnums": (2, -1)}, {"static_argnames": ("config", "mode")}])
def test_static_arguments_stay_static(options):
    def plain(w, x, config, mode):
        return (x @ w) * config + (1 if mode == "a" else 2)

    program = tracing.trace(plain, (W, X, 3, "a"), {}, options)
    assert [aval.shape for aval in program.jaxpr.in_avals] == [(8, 8), (4, 8)]


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(lambda x, w: x @ w, w=jnp.ones((8, 8))),
        jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((8, 8))),
        jax.jit(lambda x: x @ x.T),
        jax.value_and_grad(lambda x: x.sum()),
        jax.vmap(jnp.sin),
    ],
)
def test_functions_of_every_make(function):
    report = memory.analyze(function, X)
    assert [b.bytes for b in report.buffers if b.phase == "argument" and b.shape == X.shape] == [128]


def test_no_arguments():
    assert memory.analyze(lambda: jnp.ones((8, 8)) * 2).breakdown["outputs"] == 256
    assert memory.analyze(jax.jit(lambda: jax.random.normal(jax.random.key(0), (8, 8)))).breakdown["outputs"] == 256
    with pytest.raises(memory.ReportError, match="without its arguments"):
        memory.analyze(lambda x: x)


def test_a_program_takes_no_arguments():
    jitted = jax.jit(jnp.tanh)
    for program in (jitted.trace(X), jitted.lower(X), "step.hlo.pb"):
        with pytest.raises(
            memory.ReportError, match="is a program already and takes no arguments: leave the arguments out"
        ):
            memory.analyze(program, X)


def test_random_keys_are_arguments():
    for key in (jax.random.key(0), jax.eval_shape(lambda: jax.random.key(0)), jax.random.PRNGKey(0)):
        report = memory.analyze(lambda key, x: x + jax.random.normal(key, x.shape), key, X)
        assert {b.name: b.bytes for b in report.buffers if b.phase == "argument"} == {"key": 8, "x": 128}


class Filtered:
    """A jit that takes every tree, as equinox has it: arrays are traced, all else is static, and one flag donates. It
    has `lower` and no `trace`."""

    def __init__(self, function, donate=False):
        self.function = function
        self.jitted = jax.jit(self.merged, static_argnums=1, donate_argnums=(0,) if donate else ())

    def merged(self, arrays, rest):
        structure, held = rest
        arrays = iter(arrays)
        return self.function(*jax.tree.unflatten(structure, [next(arrays) if one is None else one for one in held]))

    def split(self, args):
        leaves, structure = jax.tree.flatten(args)
        is_array = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
        return (
            [leaf for leaf, own in zip(leaves, is_array) if own],
            (structure, tuple(None if own else leaf for leaf, own in zip(leaves, is_array))),
        )

    def __call__(self, *args):
        return self.jitted(*self.split(args))

    def lower(self, *args):
        return self.jitted.lower(*self.split(args))


@pytest.mark.parametrize("donate", [False, True])
def test_a_wrapper_is_traced_as_it_is_called(donate):
    def update(params, x, rate):
        assert rate == 2, "a number is no argument"
        return jax.tree.map(lambda p: p - rate * jnp.outer(x, x) if p.ndim == 2 else p, params["w"]), params["act"](x)

    wrapper = Filtered(update, donate)
    program = tracing.trace(wrapper, ({"w": W, "act": jnp.tanh}, spec((8,), jnp.float32), 2), {}, {})
    assert [aval.shape for aval in program.jaxpr.in_avals] == [(8, 8), (8,)]
    assert [leaf.donated for leaf in jax.tree.leaves(program.args_info)] == [donate, donate]
    with pytest.raises(memory.ReportError, match="donate_argnums cannot be set for a step that is jitted already"):
        memory.analyze(wrapper, X, donate_argnums=0)


@jax.tree_util.register_pytree_node_class
class Bound(Filtered):
    """One that is a tree itself, of the arrays that are bound to its function."""

    def __init__(self, w):
        super().__init__(lambda w, x: x @ w)
        self.w = w

    def __call__(self, x):
        return super().__call__(self.w, x)

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_arrays_bound_to_a_wrapper_are_arguments():
    report = memory.analyze(Bound(jnp.ones((8, 8))), X)
    assert sorted(b.bytes for b in report.buffers if b.phase == "argument") == [128, 256]


def test_flax_nnx_jit():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: (model.layers[0](x) ** 2).sum())(model)
        optimizer.update(model, gradients)
        return loss

    def made():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    x = jnp.ones((4, 8))
    for objects in (made(), nnx.eval_shape(made)):
        report = memory.analyze(train, *objects, x)
        assert report.xla.argument_bytes == 3 * 4 * (64 + 8) + 2 * 4 + x.nbytes
        assert report.breakdown["outputs"] < 128, "model and optimizer are donated"
    lowered = train.lower(*made(), x)
    assert memory.analyze(lowered).peak_bytes == memory.analyze(train, *made(), x).peak_bytes
    # jax knows numbered leaves alone, "model.states[0][1]": names are the objects' attributes.
    named = {b.name: (b.category, b.parameter) for b in report.buffers if b.phase == "argument"}
    kernel = "model.layers[0].kernel"
    assert named[kernel] == ("params", "") and named["x"] == ("batch", "") and len(named) == 3 * 2 + 3
    assert {named[f"optimizer.opt_state[0].{moment}.layers[0].kernel"] for moment in ("mu", "nu")} == {
        ("optimizer", kernel)
    }
    assert memory.analyze(lowered.compile()).allocated_bytes == report.allocated_bytes


def test_pmap(devices):
    mapped = jax.pmap(lambda w, x: w + jax.lax.psum(x @ x.T, "i"), axis_name="i", donate_argnums=0)
    shapes = spec((8, 4, 4), jnp.float32), spec((8, 4, 8), jnp.float32)
    report = memory.analyze(mapped, *shapes)
    assert sorted(b.bytes for b in report.buffers if b.phase == "argument") == [64, 128]
    assert report.breakdown["outputs"] == 0 and [c.kind for c in report.collectives] == ["all-reduce"]
    with pytest.raises(memory.ReportError, match="a mesh of 8 devices .* does not fit cpu:2, which has 2"):
        memory.analyze(mapped, *shapes, target="cpu:2")


def nnx_step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: model(x).sum())(model)
    optimizer.update(model, gradients)
    return loss


def nnx_state():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)


def test_updates_in_place_that_jit_loses_are_refused():
    """A plain step that updates NNX objects would be compiled without its update; what it returns is not lost."""
    model, optimizer = nnx_state()
    for function in (memory.analyze, memory.compile):
        with pytest.raises(memory.ReportError, match=r"nnx_step updates Linear in place.*give flax.nnx.jit\(step\)"):
            function(nnx_step, model, optimizer, X)
    assert tracing.trace(lambda model, x: model(x), (model, X), {}, {})
    assert tracing.trace(lambda *args: (nnx_step(*args), args), (model, optimizer, X), {}, {})
    assert tracing.trace(nnx.jit(nnx_step), (model, optimizer, X), {}, {})
    dropped = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    assert tracing.trace(lambda layer, x: layer(x), (dropped, X), {}, {})


def test_a_watch_leaves_updates_in_place_alone():
    told, (model, optimizer) = [], nnx_state()
    watched, before = memory.watch(nnx_step, tell=told.append), np.asarray(model.kernel[...])
    watched(model, optimizer, jnp.ones(X.shape))
    assert np.abs(np.asarray(model.kernel[...]) - before).max() > 0
    assert len(told) == 1 and "is called without a watch" in told[0] and "flax.nnx.jit" in told[0]
