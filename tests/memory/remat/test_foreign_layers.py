"""Anyone's layers: found in the jaxpr, their values as a graph, and a policy that tells these apart."""

import json
import pickle
import random
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bytescope.memory import ReportError
from bytescope.memory.cost import flops
from bytescope.memory.remat.layer_discovery import find_layers
from bytescope.memory.remat.layer_values import find_values
from bytescope.memory.remat.recognition import RematPolicy, Wanted
from bytescope.memory.remat.remat_problem import RecomputeRates
from bytescope.memory.remat.remat_solver import pareto_patterns, pattern_keeping
from bytescope.memory.remat.step_loss import Loss
from support.models import plain as foreign

pytestmark = pytest.mark.quick
RATES = RecomputeRates(dict.fromkeys(("fp8", "bf16", "fp16", "tf32", "fp32"), 1e12), 1e11)


def found(loss, args=None, **options):
    """(the loss, its layers, their values)."""
    traced = Loss(loss, args or foreign.arguments(), {})
    layers = find_layers(traced.jaxpr, traced.active)
    return traced, layers, find_values(layers, **options)


def recomputed(loss, args=None):
    traced = jax.jit(jax.value_and_grad(loss)).trace(*(args or foreign.arguments()))
    return flops.count(traced.jaxpr).recomputed


def policy_of(values, labels):
    return RematPolicy(values.wanted(labels))


def test_a_layer_that_only_a_library_calls_is_where_it_is_written():
    """A scan calls the checkpoint itself, and no frame of the user's stands between them."""

    def block(x, w):
        return jnp.tanh(x @ w), None

    args = jnp.ones((3, 4, 4)), jnp.ones((2, 4))
    _, (layer,), _ = found(lambda w, x: jax.lax.scan(jax.checkpoint(block), x, w)[0].sum(), args)
    assert layer.where == f"{__file__}:{block.__code__.co_firstlineno}" and layer.times == 3


@pytest.mark.parametrize("way", foreign.WAYS)
def test_layers_are_found_and_any_choice_costs_what_the_graph_says(way):
    """To the FLOP, in the program with its policies exchanged and in the user's own with the policy given to it."""
    loss, layers, values = found(foreign.loss_of(way))
    assert [(layer.times, layer.how) for layer in layers] == [
        (foreign.LAYERS, {"bare scan": "scan", "bare calls": "call"}.get(way, "checkpoint"))
    ]
    names = list(values.values)
    assert sum("dot_general" in name for name in names) + 2 * (way == "named") >= 8
    chance = random.Random(way)
    some = chance.sample(names, 3)
    for labels in ([], names, some):
        predicted = pattern_keeping(values.graph, RATES, "", labels).flops
        assert recomputed(loss.under(layers, policy_of(values, labels))) == predicted, labels
    predicted = pattern_keeping(values.graph, RATES, "", some).flops
    assert recomputed(foreign.loss_of(way, policy_of(values, some))) == predicted
    assert (
        pattern_keeping(values.graph, RATES, "", names).flops == 0 < pattern_keeping(values.graph, RATES, "", []).flops
    )


def test_names_are_known_by_name():
    _, _, values = found(foreign.loss_of("named"))
    assert {value.name for value in values.values.values()} >= {"context", "mid"}
    policy = policy_of(values, ["context", "mid"])
    assert policy.wanted.names == {"context", "mid"} and not policy.wanted.keys
    recomputed(foreign.loss_of("named", policy))
    policy.check()


def test_values_tell_their_type_bytes_and_place():
    _, _, values = found(foreign.loss_of("scan"))
    query = next(iter(values.values.values()))
    rows = foreign.BATCH, foreign.LENGTH
    assert query.type == f"float32[{rows[0]},{rows[1]},{foreign.HEADS},{foreign.HEAD}]"
    assert query.bytes == foreign.LAYERS * 4 * rows[0] * rows[1] * foreign.WIDTH and query.count == foreign.LAYERS
    file, line = query.where.rsplit(":", 1)
    assert file == foreign.__file__ and "einsum" in Path(file).read_text().splitlines()[int(line) - 1]


def test_equations_with_one_key_are_told_apart_by_their_order():
    """q, k and v are products of the same shapes: keeping the second of them keeps that one."""
    _, _, values = found(foreign.loss_of("scan"))
    same = [value for value in values.values.values() if value.key == next(iter(values.values.values())).key]
    assert len(same) == 3 and len({value.place for value in same}) == 3
    kept = []

    def saved(policy):
        def note(primitive, *avals, **params):
            keep = policy(primitive, *avals, **params)
            kept.append((primitive.name, keep))
            return keep

        return note

    recomputed(foreign.loss_of("scan", saved(policy_of(values, [same[1].label]))))
    products = [keep for name, keep in kept if name == "dot_general"]
    walks = len(products) // 9
    assert walks >= 2 and products == [False, True, *[False] * 7] * walks  # the first layer's input has no derivative


def test_what_a_jitted_function_hides_is_kept_together():
    """jax remembers its body and asks once for all calls."""

    def layer(x, w):
        dense = jax.jit(lambda x, w: jnp.sin(x @ w))
        return dense(dense(x, w), w)

    def loss(policy=None):
        run = jax.checkpoint(layer, policy=policy)
        return lambda w, x: jax.lax.scan(lambda x, own: (run(x, own), None), x, w)[0].sum()

    args = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    _, _, values = found(loss(), args)
    value = values.values["dot_general"]
    assert value.place == -1 and value.count == 6 and value.bytes == 6 * 4 * 8 * 4
    assert recomputed(loss(policy_of(values, [])), args) == 3 * 2 * 2 * 4 * 8 * 8
    assert recomputed(loss(policy_of(values, [value.label])), args) == 0


def test_kinds_of_layers_and_those_with_a_policy_of_their_own():
    """Both kinds under the policy are planned together; a checkpoint that has another one is left as it is."""
    other = jax.checkpoint_policies.nothing_saveable

    def wide(x, w):
        return x + jnp.tanh(x @ w) @ w.T

    def narrow(x, w):
        return jnp.tanh(x @ w[:, :8])

    def loss(policy=None):
        first, second = (jax.checkpoint(layer, policy=policy) for layer in (wide, lambda x, w: jnp.sin(x @ w @ w.T)))

        def run(w, x):
            for own in w:
                x = second(first(x, own), own)
            return jax.checkpoint(narrow, policy=other)(x, w[0]).sum()

        return run

    args = [jax.ShapeDtypeStruct((8, 16), jnp.float32)] * 2, jax.ShapeDtypeStruct((4, 8), jnp.float32)
    traced, layers, values = found(loss(), args)
    assert [layer.times for layer in layers] == [2, 2] and layers[0].mark != layers[1].mark
    always = 2 * 4 * 8 * 8
    for labels in ([], list(values.values), list(values.values)[:1]):
        predicted = pattern_keeping(values.graph, RATES, "", labels).flops + always
        assert recomputed(loss(policy_of(values, labels)), args) == predicted, labels
    with pytest.raises(ReportError, match="no layer is named wode: the loss has .*narrow.*wide"):
        find_layers(traced.jaxpr, traced.active, ["wode"])
    assert [layer.name for layer in find_layers(traced.jaxpr, traced.active, ["narrow"])] == ["narrow"]


@pytest.fixture(scope="module")
def wanted():
    """(loss, gradient) of a model that recomputes nothing."""
    return jax.jit(jax.value_and_grad(foreign.loss_of("bare scan")))(*foreign.values())


def test_gradients_are_those_without_a_policy(wanted):
    _, _, values = found(foreign.loss_of("scan"))
    policy = policy_of(values, list(values.values)[::2])
    got = jax.jit(jax.value_and_grad(foreign.loss_of("scan", policy)))(*foreign.values())
    assert float(wanted[0]) == float(got[0])
    for name in wanted[1]:
        np.testing.assert_allclose(got[1][name], wanted[1][name], rtol=2e-5, atol=1e-7)


# ---- a jax that walks otherwise ---------------------------------------------------------------------------------


def test_another_walk_is_told():
    """A version of jax that asks in another order, or no longer asks about a value, does not pass unseen."""
    _, _, values = found(foreign.loss_of("scan"))
    wanted = values.wanted(list(values.values))
    turned = Wanted(wanted.names, wanted.keys, tuple(keys[::-1] for keys in wanted.order), wanted.places, wanted.known)
    policy = RematPolicy(turned)
    with pytest.warns(
        UserWarning, match="is not the block that the remat policy was planned for: found .* where .* was expected"
    ):
        recomputed(foreign.loss_of("scan", policy))
    with pytest.raises(ReportError, match=f"does not recognize the layers of this program under jax {jax.__version__}"):
        policy.check()
    silent = RematPolicy(Wanted(keys=frozenset({"dot_general float32[1]"}), known=wanted.known))
    recomputed(foreign.loss_of("scan", silent))
    with pytest.raises(ReportError, match="1 of the kept values were not in the program, the first is dot_general"):
        silent.check()


def test_other_shapes_are_told():
    _, _, values = found(foreign.loss_of("scan"))
    policy = policy_of(values, list(values.values))
    with pytest.warns(UserWarning, match=r"dot_general float32\[6,32,32\].* is in none of the blocks"):
        other = recomputed(foreign.loss_of("scan", policy), foreign.arguments(6))
    assert other == 3 * pattern_keeping(values.graph, RATES, "", []).flops, "what it does not know is recomputed"


def test_a_walk_that_broke_off_does_not_confuse_the_next():
    _, _, values = found(foreign.loss_of("scan"))
    labels = list(values.values)[1:3]
    policy = policy_of(values, labels)
    key = policy.wanted.order[0][0]
    policy._keep_next_in_order(key)
    policy._keep_next_in_order(policy.wanted.order[0][1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert recomputed(foreign.loss_of("scan", policy)) == pattern_keeping(values.graph, RATES, "", labels).flops


def test_a_policy_crosses_processes():
    _, _, values = found(foreign.loss_of("scan"))
    policy = policy_of(values, list(values.values)[:2])
    predicted = pattern_keeping(values.graph, RATES, "", list(values.values)[:2]).flops
    for back in (
        pickle.loads(pickle.dumps(policy)),
        RematPolicy(Wanted.from_json(json.loads(json.dumps(policy.wanted.to_json())))),
    ):
        assert back.wanted == policy.wanted and "keeps 2 values" in repr(back)
        assert recomputed(foreign.loss_of("scan", back)) == predicted


def test_without_an_order_equal_keys_are_kept_together():
    _, _, values = found(foreign.loss_of("scan"), ordered=False)
    assert not any(values.order) and all(value.place == -1 for value in values.values.values())
    for labels in ([], list(values.values)[:1], list(values.values)):
        predicted = pattern_keeping(values.graph, RATES, "", labels).flops
        assert recomputed(foreign.loss_of("scan", policy_of(values, labels))) == predicted


def test_work_on_elements_that_is_written_as_a_product_is_not_worth_keeping():
    """MaxText scales its norms so: two FLOPs an element, for as many bytes as a projection."""

    def loss(w, x):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.einsum("bd,d->bd", x, w[0]) @ w))
        return jax.lax.scan(lambda x, own: (layer(x, own), None), x, w)[0].sum()

    args = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32), jax.ShapeDtypeStruct((4, 64), jnp.float32)
    _, _, values = found(loss, args)
    (value,) = values.values.values()
    assert "float32[64,64]" in value.key


def test_a_sum_of_products_is_kept_instead_of_its_terms():
    """One value saves both products; a choice among the products alone needs twice the bytes."""

    def loss(w, x):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w + jnp.sin(x) @ w.T))
        return jax.lax.scan(lambda x, own: (layer(x, own), None), x, w)[0].sum()

    args = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32), jax.ShapeDtypeStruct((4, 64), jnp.float32)
    _, _, values = found(loss, args)
    nothing, everything = pareto_patterns(values.graph, RATES, cost="flops")
    assert nothing.flops == 3 * 2 * 2 * 4 * 64 * 64 and everything.flops == 0
    assert everything.bytes - nothing.bytes == 3 * 4 * 64 * 4 and len(everything.save) == 1


# ---- the step that is compiled ----------------------------------------------------------------------------------


def test_a_step_with_an_optimizer_reuses_its_params_and_state(wanted):
    """And is the update that a user would write: value, then params moved by the optimizer."""
    args = foreign.values()
    before = jax.tree.map(np.array, args[0])

    def with_metrics(weights, x):
        value = foreign.loss_of("scan")(weights, x)
        return value, {"loss": value}

    loss, optimizer = Loss(jax.jit(with_metrics), args, {}), optax.sgd(0.1, momentum=0.9)
    assert loss.has_aux and sum(loss.active) == len(foreign.SHAPES)
    layers = find_layers(loss.jaxpr, loss.active)
    traced = loss.step(layers, None, optimizer)
    donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
    assert donated == [True] * (len(donated) - 1) + [False]
    params, state, (value, metrics) = traced.lower().compile()(args[0], optimizer.init(args[0]), args[1])
    assert float(value) == float(metrics["loss"]) and abs(float(value) - float(wanted[0])) < 1e-6 and state
    for name, grad in wanted[1].items():
        np.testing.assert_allclose(params[name], before[name] - 0.1 * np.asarray(grad), rtol=1e-4, atol=1e-5)


def test_gradients_and_state_lie_as_their_params(devices):
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    weights, x = foreign.arguments(8)
    weights = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows) for name, leaf in weights.items()}
    loss = Loss(foreign.loss_of("scan"), (weights, x), {})
    traced = loss.step(find_layers(loss.jaxpr, loss.active), None, optax.adamw(1e-2))
    moments = traced.args_info[0][1][0].mu
    assert str(traced.jaxpr).count("sharding_constraint") >= len(weights) and set(moments) == set(weights)


def test_an_optimizer_without_an_update_is_refused():
    loss = Loss(foreign.loss_of("scan"), foreign.arguments(), {})
    with pytest.raises(
        ReportError, match="optimizer='adam' needs the methods init and update: give one such as optax.adamw"
    ):
        loss.step(find_layers(loss.jaxpr, loss.active), None, "adam")


# ---- what is no loss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss, args, message",
    [
        (3, (jnp.ones(2),), "an int is not a loss"),
        (jnp.sum, (), "whose first item is differentiated"),
        (jnp.sin, (jnp.ones(2),), r"must return a scalar or \(scalar, auxiliary result\), but it returns float32\[2\]"),
        (lambda w: (w.sum(), w, w), (jnp.ones(2),), "must return a scalar or"),
        (
            jax.value_and_grad(lambda w: jnp.sin(w).sum()),
            (jnp.ones(2),),
            "this function returns a gradient: give the loss",
        ),
        (lambda w: w.sum(), ({"act": jnp.tanh},), r"args\[0\]\['act'\] is a .*: give arrays"),
        (
            lambda w: w["w"].sum(),
            ({"w": jnp.ones(2), "step": 3},),
            r"args\[0\]\['step'\] is int32 and cannot be differe",
        ),
    ],
    ids=["number", "nothing", "vector", "three", "gradient", "function", "whole number"],
)
def test_what_is_not_a_loss_is_refused(loss, args, message):
    with pytest.raises(ReportError, match=message):
        Loss(loss, args, {})


def test_a_loss_without_layers_is_told_what_to_do():
    loss = Loss(lambda w: (w @ w).sum(), (jnp.ones((4, 4)),), {})
    with pytest.raises(ReportError, match="no layers found: put jax.checkpoint around the block that repeats"):
        find_layers(loss.jaxpr, loss.active)
