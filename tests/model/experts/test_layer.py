"""Experts against the reference that multiplies every token by every expert: output, load and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bytescope.configs import base
from bytescope.model import ModelConfig, Precision
from bytescope.model.experts.exchange import EXCHANGES
from bytescope.model.experts.expert_kernels import KERNELS
from bytescope.model.experts.expert_layer import Experts
from bytescope.model.placement import ONE_DEVICE
from bytescope.train.parallel.axes import AXES, STRATEGIES, make_mesh
from bytescope.train.parallel.layout import Layout
from support.exhaustive import exhaustive

B, L, D = 8, 12, 32
SHAPE = {"d_model": D, "n_layers": 2, "experts": 8, "experts_per_token": 2, "d_expert": 48}
AMPLE = {"moe_kernel": "capacity", "capacity_factor": 8.0}  # no expert can have more rows than its slots


def config_of(**model):
    config = base.get_config().model
    config.update(**SHAPE)
    config.update(**model)
    return ModelConfig.from_dict(config)


def layout(devices, strategy="zero3", dispatch="auto", sequence_parallel=False, **sizes):
    count = int(np.prod(list(sizes.values())))
    return Layout(
        make_mesh({axis: sizes.get(axis, 1) for axis in AXES}, devices[:count]),
        STRATEGIES[strategy],
        sequence_parallel,
        dispatch=dispatch,
    )


def inputs():
    return jnp.asarray(np.random.default_rng(0).normal(size=(B, L, D)), jnp.float32)


def made(config, place):
    """(graph, state) of the layer, whose weights are large enough for outputs of about 1."""
    precision = base.get_config().precision
    precision.preset = "fp32"
    graph, state = nnx.split(
        Experts(config, Precision.from_config(precision), place, rngs=nnx.Rngs(params=jax.random.key(1)))
    )
    return graph, jax.tree.map(lambda leaf: leaf * 20, state)


def run(config, place=ONE_DEVICE, real=None, x_BLD=None):
    """(objective, output [B, L, D], load, gradients of the parameters and of the input); `real`: False for padding."""
    x_BLD = inputs() if x_BLD is None else x_BLD
    graph, state = made(config, place)

    def objective(state, x_BLD):
        y_BLD, load = nnx.merge(graph, state)(x_BLD, real)
        return (y_BLD**2).sum() + 3 * load.balance + load.router_z, (y_BLD, load)

    (total, (y_BLD, load)), grads = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(state, x_BLD)
    return jax.device_get((total, y_BLD, load, grads))


def assert_same(found, wanted, rtol=1e-5):
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, atol=rtol * max(np.abs(two).max(), 1e-30), rtol=0)


@pytest.fixture(scope="module")
def dense():
    kept = {}

    def of(**model):
        key = tuple(sorted(model.items()))
        if key not in kept:
            kept[key] = run(config_of(moe_kernel="dense", **model))
        return kept[key]

    return of


@pytest.mark.parametrize("kernel", ["scan", "capacity", *exhaustive("ragged", "grouped_interpreted")])
def test_every_kernel_equals_the_reference(kernel, dense):
    model = AMPLE if kernel == "capacity" else {"moe_kernel": kernel}
    found = run(config_of(**model))
    assert_same(found, dense())
    assert found[2].dropped == 0 and found[2].counts.sum() == B * L * 2


@pytest.mark.parametrize("kernel", ["ragged", "scan"])
def test_only_kernels_of_tiles_pad_the_rows_of_experts(kernel):
    """`lax.ragged_dot` takes the rows as they are; a tile belongs to one expert."""
    shape = EXCHANGES["allgather"].shape(64, 2, 8, 0.0, KERNELS[kernel].tile, ONE_DEVICE.peers)
    assert shape.rows == 64 * 2 + (0 if kernel == "ragged" else 8 * 16)


@pytest.mark.parametrize(
    "model",
    [
        {"router": "sigmoid", "router_bias": True, "router_groups": 4, "router_top_groups": 2, "router_scale": 2.5},
        *exhaustive(
            {"mlp": "gelu"},
            {"experts_per_token": 1, "router_renormalize": False},
            {"experts_per_token": 8},
        ),
    ],
    ids=str,
)
def test_every_router_and_mlp_equals_the_reference(model, dense):
    assert_same(run(config_of(moe_kernel="scan", **model)), dense(**model))


@pytest.mark.parametrize(
    ("strategy", "dispatch", "sizes", "sequence_parallel"),
    [
        ("zero3", "ragged_all_to_all", {"expert": 4}, False),
        ("zero3", "allgather", {"expert": 2, "fsdp": 2, "tensor": 2}, False),
        *exhaustive(
            ("zero3", "all_to_all", {"expert": 8}, False),
            ("ddp", "ragged_all_to_all", {"expert": 2, "data": 2, "tensor": 2}, True),
            ("zero1", "ragged_all_to_all", {"expert": 2, "fsdp": 2, "context": 2}, False),
            ("zero2", "all_to_all", {"expert": 2, "data": 2, "tensor": 2}, True),
            ("zero3", "allgather", {"expert": 2, "fsdp": 2, "tensor": 2}, True),
            ("zero3", "allgather", {"fsdp": 4, "tensor": 2}, True),
        ),
    ],
    ids=str,
)
def test_every_exchange_equals_the_reference(strategy, dispatch, sizes, sequence_parallel, dense, devices):
    model = AMPLE if dispatch == "all_to_all" else {"moe_kernel": "scan"}
    place = layout(devices, strategy, dispatch, sequence_parallel, **sizes)
    assert_same(run(config_of(**model), place), dense())


# Rows of 10, 9, ..., 3 tokens, and padding behind them.
REAL = np.arange(L) < np.arange(10, 2, -1)[:, None]


@pytest.fixture(scope="module")
def without_padding():
    """The same tokens in one row without padding."""
    return run(config_of(moe_kernel="dense"), x_BLD=inputs()[REAL][None])


@pytest.mark.parametrize(
    ("kernel", "dispatch", "sizes"),
    [
        ("scan", "allgather", {"expert": 2}),
        ("capacity", "auto", {}),
        *exhaustive(
            ("scan", "ragged_all_to_all", {"expert": 4}),
            ("ragged", "ragged_all_to_all", {"expert": 4}),
            ("capacity", "all_to_all", {"expert": 2}),
        ),
    ],
    ids=str,
)
def test_padding_takes_no_rows_and_counts_in_no_load(kernel, dispatch, sizes, without_padding, devices):
    """With slots that the tokens fit into, but not the padding too."""
    config = config_of(moe_kernel=kernel, capacity_factor=1.0 if kernel == "capacity" else 0.0)
    place = layout(devices, dispatch=dispatch, **sizes) if sizes else ONE_DEVICE
    total, y_BLD, load, (d_state, d_x) = run(config, place, real=REAL)
    assert load.dropped == 0 and load.counts.sum() == 2 * REAL.sum()
    assert not y_BLD[~REAL].any() and not d_x[~REAL].any()
    assert_same((total, y_BLD[REAL][None], load, (d_state, d_x[REAL][None])), without_padding)


def test_padding_that_is_not_marked_takes_the_slots_of_tokens():
    """The slots of the test above are few enough for it to show."""
    assert run(config_of(moe_kernel="capacity", capacity_factor=1.0))[2].dropped > 0


def reference(config, state, kept_TK):
    """The output with only the choices `kept_TK` (booleans), in numpy; and the choices int [T, K]."""
    arrays = {
        path[-1].key: np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    }
    x_TD = np.asarray(inputs(), np.float64).reshape(-1, D)
    logits = x_TD @ arrays["w_router"]
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    choices_TK = np.argsort(-scores, axis=-1, kind="stable")[:, : config.experts_per_token]
    weights = np.take_along_axis(scores, choices_TK, 1)
    weights /= weights.sum(-1, keepdims=True)
    y_TD = np.zeros_like(x_TD)
    for t, row in enumerate(choices_TK):
        for k, e in enumerate(row):
            if kept_TK is None or kept_TK[t, k]:
                gate, up = x_TD[t] @ arrays["w_gate"][e], x_TD[t] @ arrays["w_up"][e]
                y_TD[t] += weights[t, k] * ((gate / (1 + np.exp(-gate)) * up) @ arrays["w_down"][e])
    return y_TD.reshape(B, L, D), choices_TK


def first_of_each(choices_TK, slots, experts):
    """Which choices are among the first `slots` of their expert, in the order of tokens."""
    seen, kept = [0] * experts, np.zeros(choices_TK.shape, bool)
    for t, row in enumerate(choices_TK):
        for k, e in enumerate(row):
            kept[t, k] = seen[e] < slots
            seen[e] += 1
    return kept


@pytest.mark.parametrize("ranks", [4, *exhaustive(1)])
def test_slots_drop_the_rows_that_a_reference_drops(ranks, devices):
    """With slots for half the mean: the first of each device and expert are kept."""
    config = config_of(moe_kernel="capacity", capacity_factor=0.5)
    place = ONE_DEVICE if ranks == 1 else layout(devices, dispatch="all_to_all", expert=ranks)
    _, state = made(config, ONE_DEVICE)
    _, choices_TK = reference(config, state, None)
    tokens = B * L // ranks
    slots = max(-(-int(tokens * 2 * 0.5 / 8) // 8) * 8, 8)
    kept_TK = np.concatenate([first_of_each(part, slots, 8) for part in choices_TK.reshape(ranks, tokens, 2)])
    _, y_BLD, load, _ = run(config, place)
    assert load.dropped == (~kept_TK).sum() > (0 if ranks == 1 else -1)
    np.testing.assert_allclose(y_BLD, reference(config, state, kept_TK)[0], atol=2e-5 * np.abs(y_BLD).max())


@pytest.mark.parametrize("dispatch", ["allgather", *exhaustive("ragged_all_to_all")])
def test_a_buffer_that_is_full_drops_the_last_rows_of_its_device(dispatch, devices):
    """What fits is computed as ever; what is dropped is counted."""
    config = config_of(moe_kernel="scan", capacity_factor=0.25)
    _, y_BLD, load, _ = run(config, layout(devices, dispatch=dispatch, expert=2))
    whole, choices_TK = reference(config, made(config, ONE_DEVICE)[1], None)
    assert 0 < load.dropped < choices_TK.size and load.counts.sum() == choices_TK.size
    untouched = np.isclose(y_BLD, whole, atol=2e-5 * np.abs(whole).max()).all(-1)
    assert (~untouched).sum() <= load.dropped and untouched.any() and not untouched.all()


def test_what_is_counted_of_the_routing(dense):
    config = config_of(moe_kernel="scan")
    _, state = made(config, ONE_DEVICE)
    _, choices_TK = reference(config, state, None)
    load = run(config)[2]
    logits = np.asarray(inputs(), np.float64).reshape(-1, D) @ np.asarray(nnx.to_pure_dict(state)["w_router"])
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    counts = np.bincount(choices_TK.reshape(-1), minlength=8)
    np.testing.assert_array_equal(load.counts, counts)
    np.testing.assert_allclose(load.entropy, -(scores * np.log(scores)).sum(-1).mean(), rtol=1e-5)
    np.testing.assert_allclose(load.balance, 8 * (counts / counts.sum() * scores.mean(0)).sum(), rtol=1e-5)
    np.testing.assert_allclose(load.router_z, (np.log(np.exp(logits).sum(-1)) ** 2).mean(), rtol=1e-5)
    assert 1 < load.balance < 8


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_gradients_of_the_auxiliary_losses_are_those_of_their_formulas(router):
    """Into the router's weights and the tokens, by hand in float64; the counts of choices are constants."""
    graph, state = made(config_of(router=router, moe_kernel="dense"), ONE_DEVICE)
    pure = nnx.to_pure_dict(state)

    def auxiliary(w_router, x_BLD):
        load = nnx.merge(graph, {**pure, "w_router": w_router})(x_BLD)[1]
        return 3 * load.balance + load.router_z

    x_TD, w_DE = np.float64(inputs()).reshape(-1, D), np.float64(pure["w_router"])
    logits = x_TD @ w_DE
    counts = np.bincount(np.argsort(logits, -1)[:, -2:].reshape(-1), minlength=8)
    sums = np.exp(logits).sum(-1, keepdims=True)
    scores = np.exp(logits) if router == "softmax" else 1 / (1 + np.exp(-logits))
    slopes = scores if router == "softmax" else scores * (1 - scores)
    shares, total = scores / scores.sum(-1, keepdims=True), scores.sum(-1, keepdims=True)
    busy = counts / counts.sum()
    d_logits = 3 * 8 * slopes / total * (busy - shares @ busy[:, None]) + 2 * np.log(sums) * np.exp(logits) / sums
    d_logits /= len(x_TD)
    found = jax.jit(jax.grad(auxiliary, (0, 1)))(pure["w_router"], inputs())
    assert_same(found, (x_TD.T @ d_logits, (d_logits @ w_DE.T).reshape(B, L, D)))
