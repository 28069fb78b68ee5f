"""The loss inside a step, and the step with another policy: traced as if the policy were in the source."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.interpreters import ad
from jax.extend.core import primitives

from bytescope.memory import ReportError
from bytescope.memory.cost import flops
from bytescope.memory.program.retarget import argument_shardings
from bytescope.memory.remat.layer_discovery import find_layers
from bytescope.memory.remat.step_loss import Loss, StepLoss, remat_policy
from support.exhaustive import exhaustive
from support.models import plain

NAMES = jax.checkpoint_policies.save_only_these_names("context")
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def traced(way, policy=None):
    """A step with its update, and the policy in its source."""
    loss = plain.loss_of(way, policy)

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value

    return jax.jit(step, donate_argnums=0).trace(*plain.arguments())


def found(trace):
    loss = StepLoss.find(trace, argument_shardings)
    return loss, find_layers(loss.jaxpr, loss.active)


@contextlib.contextmanager
def remat3(flag):
    before = getattr(jax.config, "jax_remat3", None)
    if flag and before is None:
        pytest.skip("jax without jax_remat3")
    jax.config.update("jax_remat3", flag)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


@pytest.mark.quick
@pytest.mark.parametrize("flag", [False, True])
def test_the_layers_are_those_of_the_loss(flag):
    with remat3(flag):
        for way in plain.WAYS:
            loss, layers = found(functools.partial(traced, way))
            alone = Loss(plain.loss_of(way), plain.arguments(), {})
            expected = find_layers(alone.jaxpr, alone.active)
            got = [(each.times, each.how, each.mark) for each in layers]
            assert got == [(each.times, each.how, each.mark) for each in expected], way
            assert sum(loss.active) == len(plain.SHAPES) and len(loss.active) == len(plain.SHAPES) + 1
            assert sum(layers[0].active) == sum(expected[0].active)


@pytest.mark.quick
@pytest.mark.parametrize(
    "way, policy, flag",
    [
        ("scan", DOTS, False),
        ("bare scan", DOTS, False),
        ("named", NAMES, True),
        *exhaustive(("calls", DOTS, False), ("named", NAMES, False), ("scan", DOTS, True), ("calls", DOTS, True)),
    ],
)
def test_the_step_is_the_one_with_the_policy_in_its_source(way, policy, flag):
    with remat3(flag):
        _, layers = found(functools.partial(traced, way))
        before = flops.count(traced(way).jaxpr).recomputed
        with remat_policy(layers, policy):
            changed = traced(way)
        jax.clear_caches()
        written = traced(way, policy)
        assert flops.count(changed.jaxpr).recomputed == flops.count(written.jaxpr).recomputed
        if not way.startswith("bare"):  # a scan's body may get its constants in another order
            assert changed.lower().as_text() == written.lower().as_text()
        assert flops.count(traced(way).jaxpr).recomputed == before


@pytest.mark.quick
def test_a_repeated_call_is_put_under_the_checkpoint():
    _, layers = found(functools.partial(traced, "bare calls"))
    with remat_policy(layers, jax.checkpoint_policies.nothing_saveable):
        assert flops.count(traced("bare calls").jaxpr).recomputed > 0


@pytest.mark.quick
def test_the_loss_of_accumulated_micro_batches_with_an_auxiliary_result():
    loss = plain.loss_of("scan")

    def step(weights, xs):
        def micro(total, x):
            def with_aux(weights):
                return loss(weights, x), {"size": x.size, "x": x.sum(), "none": None}

            (value, aux), grads = jax.value_and_grad(with_aux, has_aux=True)(weights)
            assert aux["none"] is None and aux["size"] == x.size
            return jax.tree.map(jnp.add, total, grads), value + aux["x"]

        zeros = jax.tree.map(jnp.zeros_like, weights)
        return jax.lax.scan(micro, zeros, xs)

    weights, x = plain.arguments()
    xs = jax.ShapeDtypeStruct((4, *x.shape), x.dtype)
    trace = lambda: jax.jit(step).trace(weights, xs)  # noqa: E731
    _, layers = found(trace)
    assert [layer.times for layer in layers] == [plain.LAYERS]
    with remat_policy(layers, jax.checkpoint_policies.everything_saveable):
        assert flops.count(trace().jaxpr).recomputed == 0


@pytest.mark.quick
def test_shardings_reach_the_layers(devices):
    mesh = jax.sharding.Mesh(devices[:2], ("data",))
    weights, x = plain.arguments()
    batch = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P("data")))
    loss = plain.loss_of("scan")
    step = jax.jit(lambda weights, x: jax.grad(loss)(weights, x))
    in_step, layers = found(lambda: step.trace(weights, batch))
    specs = in_step.shards.layer_specs(layers[0].body.jaxpr)
    assert [spec for spec in specs if spec[0] == ("data",)]


@pytest.mark.quick
def test_nnx_remat_of_a_module():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        @nnx.remat
        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    model = nnx.eval_shape(lambda: nnx.List([Block(nnx.Rngs(0)) for _ in range(3)]))
    graph, state = nnx.split(model)

    def loss(layers, x):
        for layer in layers:
            x = layer(x)
        return jnp.square(x).mean()

    def step(state, x):
        return nnx.split(nnx.grad(loss)(nnx.merge(graph, state), x))[1]

    trace = lambda: jax.jit(step).trace(state, jax.ShapeDtypeStruct((4, 8), jnp.float32))  # noqa: E731
    _, layers = found(trace)
    assert (layers[0].times, layers[0].how) == (3, "checkpoint")
    counts = {}
    for policy in ("everything_saveable", "nothing_saveable"):
        with remat_policy(layers, getattr(jax.checkpoint_policies, policy)):
            counts[policy] = flops.count(trace().jaxpr).recomputed
    assert counts["everything_saveable"] == 0 < counts["nothing_saveable"]


@pytest.mark.quick
def test_what_is_no_training_step_is_refused_and_jax_is_left_as_it_was():
    before = ad.linearize, primitives.remat_p.bind, vars(primitives.scan_p).get("bind")
    with pytest.raises(ReportError, match="differentiates no function.*or compare other arguments"):
        found(lambda: jax.jit(lambda x: x * 2).trace(1.0))
    _, layers = found(functools.partial(traced, "scan"))
    with pytest.raises(ReportError, match="not traced again"), remat_policy(layers, None):
        traced("bare scan")
    with pytest.raises(ZeroDivisionError), remat_policy(layers, None):
        traced("scan")
        1 / 0  # noqa: B018
    assert before == (ad.linearize, primitives.remat_p.bind, vars(primitives.scan_p).get("bind"))
