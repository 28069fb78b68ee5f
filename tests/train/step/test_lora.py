"""LoRA: adapters equal an update of the merged weight, in values and gradients; nothing else is trained."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.memory.cost import flops
from bytescope.model.adapters import is_adapter
from bytescope.model.frozen import names_of
from bytescope.train.program.program import build
from support.exhaustive import exhaustive
from support.toy import fixed_batches, made_state, run_losses, small_config, small_program

LORA = {"lora.rank": "4", "lora.alpha": "6", "batch.micro": "8"}
SCALE = 6 / 4


def merged(params, base):
    """The base with what the adapters add to its matrices, by an einsum that knows nothing of the model's."""
    out = jax.tree.map(lambda leaf: leaf, base)
    for part, leaves in params["blocks"].items():
        for name in {key[:-2] for key in leaves}:
            a, b, w = leaves[f"{name}_a"], leaves[f"{name}_b"], base["blocks"][part][name]
            added = jnp.einsum("nir,nro->nio", a.reshape(len(a), -1, a.shape[-1]), b.reshape(*b.shape[:2], -1))
            out["blocks"][part][name] = w + SCALE * added.reshape(w.shape)
    return out


@pytest.fixture(scope="module")
def batch():
    return {name: jnp.asarray(x) for name, x in next(fixed_batches(8, 32, 64, 1)).items()}


@pytest.fixture(scope="module")
def random():
    """(adapters, base) of random numbers."""
    program = small_program(LORA)
    rng = np.random.default_rng(1)
    return tuple(
        jax.tree.map(lambda leaf: jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype), tree)
        for tree in (program.state.params, program.state.frozen)
    )


@pytest.fixture(scope="module")
def truth(random, batch):
    """Loss of the merged model, and autodiff's gradient of the adapters through the merged weights."""
    full = small_program({"batch.micro": "8"})
    return jax.jit(jax.value_and_grad(lambda params: full.parts.objective(merged(params, random[1]), batch, None)))(
        random[0]
    )


# What makes the products with frozen weights, and what is kept of adapters, differs.
@pytest.mark.parametrize(
    "overrides",
    [{"remat.policy": "minimal"}, *exhaustive({"remat.policy": "full", "model.mlp_chunk": "16"})],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_merged_weights(overrides, random, batch, truth):
    program = small_program({**LORA, **overrides})
    loss, grads = jax.jit(jax.value_and_grad(program.parts.objective))(random[0], batch, None, random[1])
    np.testing.assert_allclose(loss, truth[0], rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(truth[1]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


@pytest.mark.quick
@pytest.mark.parametrize("policy", ["none", "minimal", *exhaustive("dots_no_batch")])
def test_every_policy_traces_the_same_adapters_and_no_gradient_of_the_base(policy):
    """By FLOPs of the step, recomputation aside: 2 for each base matrix forward and 2 back, 6 for each adapter."""
    params, tokens = small_program({"batch.micro": "8"}).state.params, 8 * 32
    matrices = sum(leaf.size for part in ("attention", "mlp") for leaf in jax.tree.leaves(params["blocks"][part]))

    def count(program):
        by = flops.count(program.step.trace(program.state, program.batch_shapes).jaxpr).by
        return sum(number for (phase, _), number in by.items() if phase != "recompute")

    own = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(small_program(LORA).state.params))
    counts = [count(small_program({**more, "batch.micro": "8", "remat.policy": policy})) for more in ({}, LORA)]
    assert counts[0] - counts[1] == 2 * tokens * (matrices + params["w_head"].size) - 6 * tokens * own


@pytest.mark.quick
def test_adapters_lie_beside_their_matrices_and_leave_the_base_as_it_is():
    """Drawn after everything else, so that a seed gives one base; with B zero the model begins as the base."""
    program = small_program({**LORA, "model.n_layers": "1", "model.scan": "false"})
    names = [name for name in names_of(program.abstract()) if is_adapter(name)]
    assert len(names) == 14 and {"blocks.0.attention.w_q_a", "blocks.0.mlp.w_down_b"} < set(names)
    state, plain = (one.init() for one in (program, small_program({"model.n_layers": "1", "model.scan": "false"})))
    jax.tree.map(np.testing.assert_array_equal, state.frozen, plain.params)
    for part in state.params["blocks"][0].values():
        for name, leaf in part.items():
            bound = 1 / math.sqrt(math.prod(leaf.shape[:-1])) if name.endswith("_a") else 0.0
            assert float(jnp.abs(leaf).max()) <= bound and (not bound or float(jnp.abs(leaf).max()) > 0.8 * bound)


@pytest.fixture(scope="module")
def one_device():
    """Losses of three updates of adapters."""
    program = small_program(LORA)
    return run_losses(program, 3, state=made_state(program))


LAYOUTS = {
    "tensor and zero3": (
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "batch.micro": 2, "mesh.sequence_parallel": "true"},
        8,
    ),
    "zero1, summed in the step": (
        {"mesh.strategy": "zero1", "batch.mode": "scan", "batch.accumulation": 2, "batch.micro": 2},
        2,
    ),
    "updated in the backward pass": ({"optimizer.fused_backward": "true", "optimizer.clip": "layer"}, 1),
}


@pytest.mark.parametrize(
    "name",
    ["zero1, summed in the step", *exhaustive(*(name for name in LAYOUTS if name != "zero1, summed in the step"))],
)
def test_losses_are_those_of_one_device(name, one_device):
    overrides, devices = LAYOUTS[name]
    program = small_program({**LORA, **overrides}, devices)
    np.testing.assert_allclose(run_losses(program, 3, state=made_state(program)), one_device, rtol=2e-5)
    assert one_device[2] != one_device[0]


@pytest.mark.quick
def test_zero_shards_both_halves_where_the_rank_divides():
    for rank, halves in (("4", {(4, 8), (1, 32)}), ("2", {(8, 2), (2, 32)})):
        state = small_program({**LORA, "lora.rank": rank, "batch.micro": "2", "lora.targets": "up"}, 4).state
        mlp = state.params["blocks"]["mlp"]
        assert mlp["w_up_a"].sharding.shard_shape(mlp["w_up_a"].shape) == (3, 8, int(rank))
        whole = rank == "2"
        assert mlp["w_up_b"].sharding.shard_shape(mlp["w_up_b"].shape) == (3, 2 if whole else 1, 48), halves


def test_the_step_holds_the_base_once_and_state_of_the_adapters_alone():
    shape = {
        "model.d_model": 128,
        "model.d_ff": 512,
        "model.d_head": 32,
        "model.n_layers": 2,
        "remat.policy": "full",
        "batch.micro": "1",
    }
    full, lora = (small_program({**shape, **more}) for more in ({}, {**LORA, "batch.micro": "1"}))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (lora.state.params, lora.state.frozen)]
    stats, before = (program.compile().memory_analysis() for program in (lora, full))
    state = 12 * sizes[0] + 4 * sizes[1]
    assert stats.argument_size_in_bytes == pytest.approx(state + 2 * 4 * 32, abs=64)
    assert stats.alias_size_in_bytes == pytest.approx(state, abs=64)
    peaks = [
        one.argument_size_in_bytes + one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes
        for one in (stats, before)
    ]
    # In float32 12 bytes of state and 4 of gradients a parameter, against 4.
    assert peaks[0] < peaks[1] - 11 * sizes[1]


@pytest.mark.exhaustive
def test_dropout_is_of_the_adapters_and_does_not_depend_on_how_the_batch_is_cut():
    one = {**LORA, "model.n_layers": "1", "lora.targets": "q,down"}
    dropout = {**one, "lora.dropout": "0.2"}
    program = small_program({**dropout, "batch.micro": "16"})
    whole = run_losses(program, 2, state=made_state(program))
    cut = small_program({**dropout, "batch.micro": "2", "batch.accumulation": "2", "batch.mode": "scan"}, 4)
    np.testing.assert_allclose(run_losses(cut, 2, state=made_state(cut)), whole, rtol=2e-5)
    plain = small_program({**one, "batch.micro": "16"})
    assert not np.allclose(run_losses(plain, 1, state=made_state(plain)), whole[:1], rtol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"lora.rank": "-1"}, "lora.rank=-1"),
        ({"lora.targets": "q_proj"}, "lora.targets=q_proj has an unknown or repeated name: choose some of q, k, v"),
        ({"lora.dropout": "1"}, "lora.dropout=1.0"),
        ({"lora.dropout": "0.1", "model.mlp_chunk": "8"}, "model.mlp_chunk"),
        ({"optimizer.freeze": "w_head"}, "leave optimizer.freeze empty"),
        ({"precision.preset": "fp8"}, "precision.preset=bf16"),
        ({"lora.targets": "gate", "model.mlp": "gelu"}, "has no gate"),
    ],
)
def test_what_adapters_cannot_have_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(small_config({**LORA, **overrides}), jax.devices()[:1])
