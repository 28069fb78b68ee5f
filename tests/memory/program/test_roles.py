"""What arguments are: by what comes back, what the model reads and what gradients flow into; by names only then."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen

from bytescope import memory
from bytescope.memory.devices.compiler import compile_lowered
from bytescope.memory.devices.signature import SignatureLeaf
from bytescope.memory.program.pairing import ResultPair, keys_of, pairs, root_of
from bytescope.memory.program.roles import RULES, Evidence, decide, role
from bytescope.memory.program.state_flow import ELEMENTWISE, SAME, WRITTEN, Update
from bytescope.memory.records.report_record import ROWS

spec, f32, i32 = jax.ShapeDtypeStruct, jnp.float32, jnp.int32
B, D, F, T, V = 8, 32, 48, 16, 80


# ---- results paired with arguments, by hand -------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("path", "root", "keys"),
    [
        ("state.params['w']", "state", ("params", "w")),
        ("args[1]['a/b'][0]", "args[1]", ("a/b", "0")),
        ("flat_args[3]", "flat_args[3]", ()),
        ('[0].params["it\'s"]', "", ("0", "params", "it's")),
        ("", "", ()),
    ],
)
def test_paths_are_roots_and_keys(path, root, keys):
    assert (root_of(path), keys_of(path)) == (root, keys)


def leaves(*paths, shape=(4, 4), dtype="float32"):
    return [SignatureLeaf(path, shape, dtype, parameter=number) for number, path in enumerate(paths)]


def paired(arguments, results, updates=(), trained=True, aliased=()):
    """(path of an argument, path of a result, whether that is its gradient) of each pair."""
    updates = [*updates, *[Update()] * (len(results) - len(updates))]
    found = pairs(arguments, results, updates, trained, dict(aliased))
    return {(arguments[p.argument].path, results[p.result].path, p.gradient) for p in found}


@pytest.mark.quick
def test_state_comes_back_under_its_own_path():
    arguments = leaves("state.params['w']", "state.opt[0].mu['w']", "state.opt[0].nu['w']", "batch['w']")
    results = leaves("[0].opt[0].mu['w']", "[0].opt[0].nu['w']", "[0].params['w']", "[1]")
    assert paired(arguments, results) == {
        (f"state{rest}", f"[0]{rest}", False) for rest in (".params['w']", ".opt[0].mu['w']", ".opt[0].nu['w']")
    }


@pytest.mark.quick
def test_shapes_and_dtypes_have_to_agree():
    assert paired(leaves("p['w']"), leaves("['w']", shape=(4, 5))) == set()
    assert paired(leaves("p['w']"), leaves("['w']", dtype="bfloat16")) == set()


@pytest.mark.quick
def test_places_in_tuples_count_for_whole_arguments_only():
    assert paired(leaves("carry[0]", "carry[1]", "x"), leaves("[0][0]", "[0][1]", "[1]")) == {
        ("carry[0]", "[0][0]", False),
        ("carry[1]", "[0][1]", False),
    }
    assert paired(leaves("batch[0]"), leaves("[0]")) == set()


@pytest.mark.quick
def test_what_the_backward_pass_returns_is_a_gradient():
    backward = Update(phase="backward")
    assert paired(leaves("params['w']"), leaves("[1]['w']"), [backward]) == {("params['w']", "[1]['w']", True)}
    assert paired(leaves("p", "x"), leaves(""), [backward]) == {("p", "", True)}
    decayed = Update({0: ELEMENTWISE}, phase="backward")  # an update made within the backward pass is one
    assert paired(leaves("params['w']"), leaves("[1]['w']"), [decayed]) == {("params['w']", "[1]['w']", False)}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("how", "trained", "found"),
    [(ELEMENTWISE, True, True), (ELEMENTWISE, False, False), (WRITTEN, False, True), (SAME, False, True)],
)
def test_without_paths_the_flow_of_values_tells(how, trained, found):
    """x + f(x) is no update of x where nothing is learned; what is written into x is."""
    assert bool(paired(leaves("p"), leaves("[0]"), [Update({0: how})], trained)) == found


@pytest.mark.quick
def test_moments_are_made_of_fewer_arguments_than_the_parameter():
    arguments, results = leaves("p", "m", "v"), leaves("[0]", "[1]", "[2]")
    made = [Update(dict.fromkeys(numbers, ELEMENTWISE)) for numbers in ((0, 1, 2), (1,), (2,))]
    assert paired(arguments, results, made) == {("p", "[0]", False), ("m", "[1]", False), ("v", "[2]", False)}


@pytest.mark.quick
def test_donated_memory_tells_where_nothing_else_does():
    assert paired(leaves("a"), leaves("[0]"), trained=False, aliased={0: 0}) == {("a", "[0]", False)}
    assert pairs([], [], [], False, {}) == [] and ResultPair(0, 1) != ResultPair(0, 1, True)


# ---- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # structure: a name for data is no reason against it
        ({"path": "x", "trained": True, "state": True, "read": True, "learns": True}, "params"),
        ({"path": "position['w']", "trained": True, "state": True, "learns": True, "mirrors": True}, "optimizer"),
        ({"path": "tokens", "trained": True, "state": True, "read": True}, "cache"),
        ({"path": "target['w']", "trained": True, "mirrors": True, "read": True}, "params"),
        ({"path": "theta_ema['w']", "trained": True, "state": True, "mirrors": True, "learns": True}, "optimizer"),
        ({"path": "s", "shape": (), "dtype": "int32", "trained": True, "state": True}, "optimizer"),
        ({"path": "s[0]", "state": True}, "cache"),
        ({"path": "a", "dtype": "key<fry>", "shape": ()}, "rng"),
        ({"path": "a", "dtype": "uint32", "shape": (2,)}, "batch"),
        ({"path": "a", "dtype": "uint32", "shape": (5, 2), "random": True}, "rng"),
        ({"path": "dropout_rng", "dtype": "uint32", "shape": (2,)}, "rng"),
        ({"path": "seed", "dtype": "int32", "shape": ()}, "rng"),
        (
            {
                "path": "model.blocks[0].dropout.rngs.count",
                "dtype": "uint32",
                "shape": (),
                "trained": True,
                "state": True,
            },
            "rng",
        ),
        ({"path": "tower['kv_proj'].kernel", "gradient": True}, "params"),
        ({"path": "image", "gradient": True}, "batch"),
        ({"path": "a['s']", "products": True}, "params"),
        ({"path": "a['s']", "products": True, "batch_dim": True}, "batch"),
        ({"path": "a['s']", "products": True, "trained": True}, "batch"),
        ({"path": "o.optim_state[1]", "trained": True, "state": True, "learns": True, "read": True}, "optimizer"),
        (
            {"path": "o.optim_state[0]", "trained": True, "state": True, "learns": True, "read": True, "forward": True},
            "params",
        ),
        ({"path": "a['s']", "weights": True}, "params"),
        # the variables of a model inside the optimizer's state
        ({"path": "s[1][0].mu['params']['w']", "trained": True, "state": True, "learns": True}, "optimizer"),
        ({"path": "s[1].trace['params']['w']", "trained": True, "state": True, "learns": True}, "optimizer"),
        ({"path": "s[1][0].nu['batch_stats']['mean']", "trained": True, "state": True}, "optimizer"),
        ({"path": "s[1].acc_grads['params']['w']", "trained": True, "state": True, "learns": True}, "accumulator"),
        ({"path": "m['params']['w']", "trained": True, "state": True, "learns": True, "repeats": True}, "optimizer"),
        ({"path": "m['params']['w']", "trained": True, "state": True, "learns": True}, "params"),
        ({"path": "s['mu']['params']['w']", "trained": True, "state": True, "read": True}, "params"),
        ({"path": "s.params['mu']['w']", "trained": True, "state": True, "read": True}, "params"),
        ({"path": "s.params['head'].mu['kernel']", "trained": True, "state": True, "read": True}, "params"),
        (
            {
                "path": "s.mu['params']['w']",
                "trained": True,
                "state": True,
                "learns": True,
                "read": True,
                "forward": True,
            },
            "params",
        ),
        ({"path": "a['s']", "dtype": "int32", "products": True}, "batch"),
        # names, where structure leaves a choice
        ({"path": "state['kv_proj']['kernel']"}, "params"),
        ({"path": "m['token_embedder']['embedding']"}, "params"),
        ({"path": "m['positional_embedding']"}, "params"),
        ({"path": "target_params['w']"}, "params"),
        ({"path": "cache['layer_0']['cached_key']"}, "cache"),
        ({"path": "batch_stats['bn']['mean']"}, "cache"),
        ({"path": "variables['batch_stats']['bn']['mean']"}, "cache"),
        ({"path": "kv", "returned": True}, "cache"),
        ({"path": "batch['weights']"}, "batch"),
        ({"path": "state.opt_state.acc_grads['w']"}, "accumulator"),
        ({"path": "grads['w']"}, "gradients"),
        ({"path": "model['attn']['k']"}, "params"),
        ({"path": "k"}, "batch"),
    ],
)
def test_roles_by_evidence(fields, expected):
    assert decide([Evidence(**{"shape": (4, 4), **fields})]) == [expected]


@pytest.mark.quick
def test_every_role_is_a_row():
    assert {name for name, _ in RULES} <= set(ROWS) and role("p") == role("theta") == "params"


# ---- programs -------------------------------------------------------------------------------------------------------


def roles_of(step, *args, **options):
    """Path -> role of a program's arguments, and its report."""
    report = memory.analyze(step, *args, **options)
    return {b.name: b.category for b in report.buffers if b.phase == "argument"}, report


def mlp(weights, x):
    return jnp.tanh(x @ weights["w"]) @ weights["v"]


WEIGHTS, X = {"w": spec((D, F), f32), "v": spec((F, D), f32)}, spec((B, D), f32)


def adam(state, x, y):
    p, m, v = state
    g = jax.grad(lambda p: ((jnp.tanh(x @ p[0]) @ p[1] - y) ** 2).mean())(p)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, v, g)
    return jax.tree.map(lambda p, m, v: p - m / jnp.sqrt(v + 1e-8), p, m, v), m, v


def test_adam_in_tuples_and_its_gradients_know_their_parameters():
    found, report = roles_of(adam, ((spec((D, F), f32), spec((F, D), f32)),) * 3, X, X)
    assert found == {
        "x": "batch",
        "y": "batch",
        **{f"state[0][{i}]": "params" for i in (0, 1)},
        **{f"state[{k}][{i}]": "optimizer" for k in (1, 2) for i in (0, 1)},
    }
    owners = {b.name: b.parameter for b in report.buffers if b.category == "optimizer"}
    assert owners == {f"state[{k}][{i}]": f"state[0][{i}]" for k in (1, 2) for i in (0, 1)}


def test_single_arrays_under_any_name():
    def step(x, m, key, batch):
        g = jax.grad(lambda x: ((jnp.tanh(batch @ x)) ** 2).mean())(x)
        m = 0.9 * m + g
        return x - 0.1 * m, m, jax.random.split(key)[0]

    found, report = roles_of(step, spec((D, F), f32), spec((D, F), f32), spec((2,), jnp.uint32), X)
    assert found == {"x": "params", "m": "optimizer", "key": "rng", "batch": "batch"}
    assert report.breakdown["rng"] == 8


def test_batch_statistics_are_carried_and_target_weights_are_weights():
    def step(p, tp, running, x):
        def loss(p):
            h = mlp(p, x) - jax.lax.stop_gradient(mlp(tp, x))
            return ((h - running["mean"][None]) ** 2).mean(), {"mean": 0.9 * running["mean"] + 0.1 * h.mean(0)}

        g, running = jax.grad(loss, has_aux=True)(p)
        p = jax.tree.map(lambda p, g: p - g, p, g)
        return p, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, tp, p), running

    found, report = roles_of(step, WEIGHTS, WEIGHTS, {"mean": spec((D,), f32)}, X)
    assert found == {
        "running['mean']": "cache",
        "x": "batch",
        **{f"{t}['{n}']": "params" for t in ("p", "tp") for n in ("w", "v")},
    }
    assert report.breakdown["cache"] == 4 * D


def decode(weights, kv, token, at):
    """One step of attention with a cache."""
    k, v = kv
    x = weights["token_embedder"]["embedding"][token]
    new = (x @ weights["kv_proj"]["kernel"])[:, None]
    k, v = (jax.lax.dynamic_update_slice_in_dim(old, new, at, 1) for old in (k, v))
    probs = jax.nn.softmax(jnp.einsum("bd,btd->bt", x, k))
    return jnp.einsum("bt,btd->bd", probs, v) @ weights["token_embedder"]["embedding"].T, (k, v)


DECODE = (
    {"token_embedder": {"embedding": spec((V, D), f32)}, "kv_proj": {"kernel": spec((D, D), f32)}},
    (spec((B, T, D), f32),) * 2,
    spec((B,), i32),
    spec((), i32),
)


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("dumped", [False, True])
def test_a_cache_is_a_row_and_weights_are_known_by_their_use(donated, dumped):
    lowered = jax.jit(lambda *args: decode(*args), donate_argnums=(1,) if donated else ()).lower(*DECODE)
    report = memory.analyze(compile_lowered(lowered).proto if dumped else lowered)
    assert report.breakdown["cache"] == 2 * 4 * B * T * D
    assert report.breakdown["params"] == 4 * (V * D + D * D)
    assert report.breakdown["batch"] == 4 * B + 4
    found = {f.kind: f for f in report.findings}
    assert ("not_donated" in found) == (not donated)
    if not donated:  # the weights, and logits that are as large as something else, are none of it
        assert found["not_donated"].bytes == report.breakdown["cache"] and "(args[1])" in found["not_donated"].message


def test_a_gradient_that_is_returned_has_its_parameters_name():
    report = memory.analyze(lambda m, x: jax.value_and_grad(lambda m: mlp(m, x).sum())(m), WEIGHTS, X)
    assert {b.parameter for b in report.buffers if b.category == "outputs" and b.shape in ((D, F), (F, D))} == {
        "m['w']",
        "m['v']",
    }
    assert report.breakdown["params"] == 2 * 4 * D * F
    assert "not_donated" not in {f.kind for f in report.findings}


def test_paths_that_the_program_lost_come_from_its_signature(devices):
    step = jax.pmap(lambda state, x: {"p": state["p"] - x @ state["p"]}, devices=devices[:1])
    report = memory.analyze(step.lower({"p": spec((1, D, D), f32)}, spec((1, D, D), f32)))
    assert {b.name for b in report.buffers if b.phase == "argument"} == {"args[0]['p']", "args[1]"}


# ---- variables of Flax Linen, whose key `params` is inside the optimizer's state too -------------------------------


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(D)(jnp.tanh(linen.Dense(F)(x)))


def linen_update(tx, variables, opt_state, x):
    grads = jax.grad(lambda variables: (Mlp().apply(variables, x) ** 2).mean())(variables)
    updates, opt_state = tx.update(grads, opt_state, variables)
    return optax.apply_updates(variables, updates), opt_state


VARIABLES = jax.eval_shape(Mlp().init, jax.random.key(0), X)
PARAMS = 4 * (2 * D * F + D + F)
# name -> (optimizer, number of its moments per parameter, bytes of its counters)
OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), 2, 4),
    "sgd with momentum": (optax.sgd(1e-2, momentum=0.9), 1, 0),
    "decay before momentum": (optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(1e-2, momentum=0.9)), 1, 0),
}
# name -> (order of variables and optimizer state in the state, their keys in the state)
STATES = {
    "variables first": ("variables", "opt"),
    "optimizer first": ("opt", "variables"),
    "dict": {"params": "variables", "opt_state": "opt"},
    "dict with other keys": {"weights": "variables", "opt": "opt"},
}


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [*((layout, "adamw") for layout in STATES), ("dict", "sgd with momentum"), ("dict", "decay before momentum")],
)
def test_moments_of_linen_variables_are_optimizer_state(layout, optimizer):
    layout, (tx, moments, counters) = STATES[layout], OPTIMIZERS[optimizer]

    def pack(variables, opt):
        return jax.tree.map({"variables": variables, "opt": opt}.get, layout)

    def unpack(state):
        flat = (
            dict(zip(layout.values(), map(state.get, layout))) if isinstance(layout, dict) else dict(zip(layout, state))
        )
        return flat["variables"], flat["opt"]

    def step(state, x):
        return pack(*linen_update(tx, *unpack(state), x))

    state = pack(VARIABLES, jax.eval_shape(tx.init, VARIABLES))
    found, report = roles_of(step, state, X, donate_argnums=0)
    assert report.breakdown["params"] == PARAMS
    assert report.breakdown["optimizer"] == moments * PARAMS + counters
    owners = {b.name: b.parameter for b in report.buffers if b.category == "optimizer" and b.shape}
    assert len(owners) == 4 * moments
    assert all(found[owner] == "params" and name.endswith(owner[-25:]) for name, owner in owners.items()), owners


def test_moments_without_names_repeat_the_variables_and_averages_of_variables_do_not():
    def step(state, x):
        variables, m, v, average = state
        grads = jax.grad(lambda variables: (Mlp().apply(variables, x) ** 2).mean())(variables)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, v, grads)
        variables = jax.tree.map(lambda p, m, v: p - m / jnp.sqrt(v + 1e-8), variables, m, v)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, variables)
        return variables, m, v, average

    found, report = roles_of(step, (VARIABLES,) * 4, X, donate_argnums=0)
    assert {name[:8]: category for name, category in found.items() if name != "x"} == {
        "state[0]": "params",
        "state[1]": "optimizer",
        "state[2]": "optimizer",
        "state[3]": "params",
    }
    assert report.breakdown["params"] == report.breakdown["optimizer"] == 2 * PARAMS
