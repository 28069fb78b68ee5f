"""Latent attention against transformers', kernels and policies against each other, shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bytescope.configs import base
from bytescope.model import PRECISIONS, ModelConfig
from bytescope.model.attention.attention_kernels import choose_kernel
from bytescope.model.attention.latent import LatentAttention
from bytescope.model.placement import ONE_DEVICE
from support.crossing import INPUT, crossing, custom, gradient
from support.exhaustive import exhaustive
from support.toy import first_state, fixed_batches, run_losses, small_program

D, L, H, K, ROPE, VALUE, RANK = 32, 24, 4, 8, 6, 10, 16
MLA = {"attention_kind": "mla", "mla_kv_rank": RANK, "mla_d_rope": ROPE, "mla_d_value": VALUE, "n_kv_heads": H}
SIZES = {"d_model": D, "n_layers": 2, "n_heads": H, "d_head": K, "norm_eps": 1e-6, "attention": "naive"}


def config_of(**changes) -> ModelConfig:
    return ModelConfig.from_dict({**base.get_config().model.to_dict(), **SIZES, **MLA, **changes})


def attend(module: LatentAttention, x_BLD: jax.Array) -> jax.Array:
    return module.output(module.core(*module.inputs(x_BLD, None), None, None), None)


def halves(rows: np.ndarray) -> np.ndarray:
    """The last axis from pairs (0, 1), (2, 3), ... to pairs (i, i + half)."""
    return np.concatenate([rows[..., 0::2], rows[..., 1::2]], axis=-1)


def ours(theirs: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """Weights of transformers' module, or gradients of them, as ours."""

    def heads(name: str) -> np.ndarray:
        rows = theirs[f"{name}.weight"]
        return np.moveaxis(rows.reshape(H, -1, rows.shape[-1]), -1, 0)

    def rotated(x: np.ndarray, start: int) -> np.ndarray:
        return np.concatenate([x[..., :start], halves(x[..., start:])], axis=-1)

    kv = heads("kv_b_proj")
    found = {
        "w_kv_down": rotated(theirs["kv_a_proj_with_mqa.weight"].T, RANK),
        "w_k_up": kv[..., :K],
        "w_v_up": kv[..., K:],
        "norm_kv_latent": theirs["kv_a_layernorm.weight"],
        "w_o": theirs["o_proj.weight"].T.reshape(H, VALUE, D),
    }
    if not rank:
        return {**found, "w_q": rotated(heads("q_proj"), K)}
    return {
        **found,
        "w_q_down": theirs["q_a_proj.weight"].T,
        "w_q_up": rotated(heads("q_b_proj"), K),
        "norm_q_latent": theirs["q_a_layernorm.weight"],
    }


def reference(rank: int, x_BLD: np.ndarray, weight_BLD: np.ndarray):
    """transformers' module with random weights: (weights, output, gradients of the weights and of the input)."""
    import torch
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    torch.manual_seed(0)
    shape = DeepseekV3Config(
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=rank or None,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=K,
        v_head_dim=VALUE,
        rope_interleave=True,
        attention_bias=False,
        max_position_embeddings=64,
        attn_implementation="eager",
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    module = theirs.DeepseekV3Attention(shape, 0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    x = torch.tensor(x_BLD, requires_grad=True)
    turns = theirs.DeepseekV3RotaryEmbedding(shape)(x, torch.arange(L)[None])
    mask = torch.full((L, L), float("-inf")).triu(1)[None, None]
    y = module(x, turns, mask)[0]
    (y * torch.tensor(weight_BLD)).sum().backward()
    weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters()}
    return ours(weights, rank), y.detach().numpy(), ours(gradients, rank), x.grad.numpy()


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("rank", [12, *exhaustive(0)])
def test_output_and_gradients_are_those_of_transformers(rank):
    x_BLD, weight_BLD = np.random.default_rng(0).standard_normal((2, 2, L, D)).astype(np.float32)
    weights, output, gradients, d_x = reference(rank, x_BLD, weight_BLD)
    graph, state = nnx.split(
        LatentAttention(config_of(mla_q_rank=rank), PRECISIONS["fp32"], ONE_DEVICE, rngs=nnx.Rngs(0))
    )
    params = nnx.to_pure_dict(state)
    assert set(params) == set(weights)
    # `ours` names the scale of a norm by the norm.
    params = {
        name: {"scale": jnp.asarray(w)} if name.startswith("norm") else jnp.asarray(w) for name, w in weights.items()
    }

    def weighed(params, x_BLD):
        y_BLD = attend(nnx.merge(graph, params), x_BLD)
        return (y_BLD * weight_BLD).sum(), y_BLD

    (_, y_BLD), found = jax.jit(jax.value_and_grad(weighed, (0, 1), has_aux=True))(params, jnp.asarray(x_BLD))
    np.testing.assert_allclose(y_BLD, output, rtol=2e-5, atol=2e-5)
    named = {name: leaf["scale"] if name.startswith("norm") else leaf for name, leaf in found[0].items()}
    for one, other in [(found[1], d_x), *((named[name], gradients[name]) for name in weights)]:
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


KEYS = {f"model.{name}": value for name, value in {**MLA, "mla_q_rank": 12, "mla_d_value": 6}.items()} | {
    "model.mla_kv_rank": 16,
    "model.n_layers": 2,
}


def gradients(**changes):
    program = small_program({**KEYS, **changes})
    batch = {name: jnp.asarray(array) for name, array in next(fixed_batches(8, 32, 64, 1)).items()}
    keys = jax.random.split(jax.random.key(0), 8)
    return jax.jit(jax.value_and_grad(program.parts.loss, has_aux=True))(first_state(program).params, batch, keys)


@pytest.fixture(scope="module")
def plain():
    return gradients(**{"model.attention": "naive"})


@pytest.mark.parametrize(
    "changes",
    [
        {
            "model.attention": "chunked",
            "model.attention_chunk": 8,
            "remat.policy": "custom",
            "remat.save": "kv_latent,k_rope,q,lse",
        },
        *exhaustive(
            {"remat.policy": "full"},
            {"remat.policy": "minimal"},
        ),
    ],
    ids=str,
)
def test_kernels_and_policies_give_the_same_gradients(changes, plain):
    found = gradients(**{"model.attention": "naive", **changes})
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6 * largest)


def test_a_policy_may_keep_the_latents_alone():
    """Two layers, rows of 32 tokens, float32: the width, the rank of the latent, the rotated part."""
    kept = {"kv_latent": 16, "k_rope": ROPE}
    program = small_program(custom({**KEYS, "model.attention": "chunked", "model.attention_chunk": 8}, kept))
    tokens = 2 * program.batch.rows * 32
    assert crossing(gradient(program)) == {name: tokens * width * 4 for name, width in {INPUT: 32, **kept}.items()}


@pytest.mark.exhaustive
def test_a_small_deepseek_on_its_mesh_has_the_losses_of_one_device():
    """One dense layer, two of experts in groups with a shared one; none dropped."""
    keys = {
        **KEYS,
        "model.n_layers": 3,
        "model.experts": 8,
        "model.experts_per_token": 3,
        "model.d_expert": 16,
        "model.shared_experts": 1,
        "model.dense_layers": 1,
        "model.router": "sigmoid",
        "model.router_bias": True,
        "model.router_groups": 4,
        "model.router_top_groups": 2,
        "model.router_scale": 2.5,
        "model.moe_kernel": "capacity",
        "model.capacity_factor": 8.0,
        "remat.policy": "full",
    }
    mesh = {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2, "mesh.sequence_parallel": True, "batch.micro": 2}
    one, shared = small_program(keys), small_program({**keys, **mesh}, 8)
    blocks = shared.state.params["blocks"]
    assert blocks["experts"]["w_up"].sharding.shard_shape((2, 8, 32, 16)) == (2, 4, 16, 8)
    assert blocks["attention"]["w_k_up"].sharding.shard_shape((2, 16, 4, 8)) == (2, 4, 2, 8)
    assert blocks["attention"]["w_kv_down"].sharding.shard_shape((2, 32, 22)) == (2, 8, 22)
    np.testing.assert_allclose(run_losses(shared, 3), run_losses(one, 3), rtol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": True}, "model.qk_norm=true cannot be combined with model.attention_kind=mla"),
        ({"mla_d_rope": 5}, "is odd"),
        ({"n_kv_heads": 2}, "set model.n_kv_heads=4"),
        ({"position": "learned"}, "set model.position=rope"),
    ],
    ids=str,
)
def test_what_cannot_be_built(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.context": 2}, "mesh.context=2: ring attention"),
        ({"lora.rank": 4}, "lora.rank=4 cannot be combined with model.attention_kind"),
        ({"model.attention_kind": "mha"}, "model.attention_kind='mha'"),
    ],
    ids=str,
)
def test_what_latent_attention_does_not_go_with(changes, message):
    with pytest.raises(ValueError, match=message):
        small_program({**KEYS, **changes}, 2)


def test_heads_too_wide_for_cudnn_take_the_chunked_kernel():
    kernel, why = choose_kernel(config_of(attention="auto", d_head=128, mla_d_rope=64), PRECISIONS["bf16"], "gpu", 4096)
    assert kernel == "chunked" and "not 192, model.d_head=128 and model.mla_d_rope=64" in why
    assert (
        choose_kernel(config_of(attention="auto", mla_d_rope=8, mla_d_value=8), PRECISIONS["bf16"], "gpu", 4096)[0]
        == "cudnn"
    )
