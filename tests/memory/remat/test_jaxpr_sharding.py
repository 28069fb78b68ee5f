"""Over how many devices a layer's values are sharded, followed through a jaxpr and compared with the compiler."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.remat.jaxpr_sharding import JaxprSharding
from bytescope.memory.remat.layer_discovery import find_layers
from bytescope.memory.remat.layer_values import find_values
from bytescope.memory.remat.recognition import RematPolicy
from bytescope.memory.remat.step_loss import Loss
from support.models import plain as foreign

HEADS, HIDDEN = P(None, None, "model"), P(None, None, "model")
TENSOR = {
    "q": HEADS,
    "k": HEADS,
    "v": HEADS,
    "o": P(None, "model"),
    "gate": HIDDEN,
    "up": HIDDEN,
    "down": P(None, "model"),
}
FSDP = {
    "q": P(None, "data"),
    "k": P(None, "data"),
    "v": P(None, "data"),
    "o": P(None, None, None, "data"),
    "gate": P(None, "data"),
    "up": P(None, "data"),
    "down": P(None, None, "data"),
}


def mesh_of(devices, **axes):
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), devices=devices, axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )


def sharded(mesh, specs):
    """(weights, x), x by its rows."""
    weights, x = foreign.arguments(16)
    place = {name: NamedSharding(mesh, specs.get(name, P())) for name in weights}
    return (
        {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place[name]) for name, leaf in weights.items()},
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data"))),
    )


def found(args):
    loss = Loss(foreign.loss_of("scan"), args, {})
    layers = find_layers(loss.jaxpr, loss.active)
    return loss, layers, find_values(layers, loss.shards), find_values(layers)


def test_tensor_parallel_values_take_what_the_compiler_gives_them(devices):
    """To the byte: heads and hidden units are sharded over all devices, what is summed over them by its rows alone."""
    loss, layers, values, whole = found(sharded(mesh_of(devices, data=2, model=4), TENSOR))
    products = {label: value for label, value in values.values.items() if "dot_general" in label}
    parts = {label: whole.values[label].bytes // value.bytes for label, value in products.items()}
    assert sorted(parts.values()) == [2, *[8] * 7] and parts["dot_general.6"] == 2
    assert whole.values["dot_general.6"].where.endswith(f":{line_of('blhk,hkd->bld')}")
    report = memory.analyze(loss.step(layers, RematPolicy(values.wanted(products))), target="cpu:8")
    kept = sum(value.bytes for value in products.values())
    assert report.breakdown["residuals"] == values.graph.carry_bytes + kept
    assert 2 * values.graph.carry_bytes == whole.graph.carry_bytes


def line_of(text):
    with open(foreign.__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


@pytest.mark.quick
@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}])
def test_under_fsdp_every_value_lies_as_its_batch(devices, axes):
    """Weights that share the batch's axis are gathered; an axis that nothing is sharded over counts for nothing."""
    count = 4
    _, _, values, whole = found(sharded(mesh_of(devices[:count], **axes), FSDP))
    assert sum("dot_general" in label for label in values.values) == 8
    assert {whole.values[label].bytes // value.bytes for label, value in values.values.items()} == {axes["data"]}
    assert whole.graph.carry_bytes == axes["data"] * values.graph.carry_bytes


RULES = {
    "heads are split off": (lambda x, w: x.reshape(8, 4, 2, 4), (P("a", "b"), P()), 4),
    "heads are merged": (lambda x, w: x.reshape(32, 8), (P("a"), P()), 2),
    "what is merged into another is gathered": (lambda x, w: x.reshape(256), (P(None, "b"), P()), 1),
    "a transpose": (lambda x, w: x.T @ x, (P("a", "b"), P()), 2),
    "a sum over a sharded dimension": (lambda x, w: x.sum(1), (P("a", "b"), P()), 2),
    "a product by columns": (lambda x, w: x @ w, (P("a"), P(None, "b")), 4),
    "one axis on both sides": (lambda x, w: x @ w, (P("a"), P("a")), 2),
    "rows of a table": (lambda x, w: x[jnp.argmax(w, 1)], (P(), P("a")), 2),
    "a broadcast": (lambda x, w: jnp.broadcast_to(x[:, None], (8, 3, 32)), (P("a", "b"), P()), 4),
    "a constraint": (
        lambda x, w: jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(MESH, P("a"))),
        (P(), P()),
        2,
    ),
    "a loop's own": (lambda x, w: jax.lax.scan(lambda c, r: (c, r * 2), 0.0, x)[1], (P(None, "b"), P()), 2),
    "a loop that makes it so": (
        lambda x, w: jax.lax.scan(lambda c, r: (c + r, None), jnp.zeros(32), x)[0],
        (P(None, "b"), P()),
        2,
    ),
    "a jitted function": (lambda x, w: jax.jit(jnp.tanh)(x), (P("a"), P()), 2),
    "what does not divide": (lambda x, w: x[:7], (P("a"), P()), 1),
    "both axes on one dimension": (lambda x, w: jnp.sin(x), (P(("a", "b")), P()), 4),
}
MESH = jax.sharding.AbstractMesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.quick
@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    function, specs, parts = RULES[rule]
    shardings = [NamedSharding(MESH, spec) for spec in specs]
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 32), (32, 32))))
    assert JaxprSharding.from_arguments(jaxpr, shardings).parts(jaxpr.jaxpr.outvars[0]) == parts
    assert JaxprSharding.from_arguments(jaxpr, [None, None]).parts(jaxpr.jaxpr.outvars[0]) == 1
