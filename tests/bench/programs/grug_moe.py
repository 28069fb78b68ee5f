"""A mixture-of-experts transformer like Marin's Grug: unrolled and recomputed blocks, padded experts, one GPU.

The measured limits are those of github.com/marin-community/marin/issues/5587: one GH200 with 96 GB, bfloat16
parameters and moments, 2 sequences of 4,096 tokens. The issue states the number of parameters, but not the shape. The
width of 6,144 and the 24,576 padded rows of the experts are from its profile; the rest is chosen here, and the width of
the experts makes up the published number of parameters.
"""

import math

import jax
import jax.numpy as jnp
import optax

spec = jax.ShapeDtypeStruct
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 6144, 6, 48, 12, 128
VOCAB, EXPERTS, EXPERTS_PER_TOKEN, ROWS = 128_256, 8, 2, 24_576
SEQUENCES, LENGTH, CHUNK = 2, 4096, 1024
OPTIMIZERS = {"adam": optax.adam, "lion": optax.lion}
# Parameters of one layer without the routed experts, and of the embedding and the output head.
_ATTENTION = WIDTH * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
_LAYER = _ATTENTION + 3 * WIDTH * WIDTH + WIDTH * EXPERTS + 2 * WIDTH
_TABLES = 2 * VOCAB * WIDTH + WIDTH


def expert_width(parameters: float) -> int:
    """Returns the width of one expert with which the model has about this number of parameters."""
    return round(((parameters - _TABLES) / LAYERS - _LAYER) / (EXPERTS * 3 * WIDTH))


def parameter_shapes(parameters: float) -> dict:
    """Returns the shapes of all parameters of a model with about this number of parameters."""
    inner, queries, keys = expert_width(parameters), HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "norm_attention": (WIDTH,),
        "w_q": (WIDTH, queries),
        "w_k": (WIDTH, keys),
        "w_v": (WIDTH, keys),
        "w_o": (queries, WIDTH),
        "norm_mlp": (WIDTH,),
        "router": (WIDTH, EXPERTS),
        "experts_gate_up": (EXPERTS, WIDTH, 2 * inner),
        "experts_down": (EXPERTS, inner, WIDTH),
        "shared_gate_up": (WIDTH, 2 * WIDTH),
        "shared_down": (WIDTH, WIDTH),
    }
    return {
        "embed": (VOCAB, WIDTH),
        "layers": [dict(layer) for _ in range(LAYERS)],
        "norm": (WIDTH,),
        "head": (WIDTH, VOCAB),
    }


def _norm(x, scale):
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale


def _gated(x, gate_up, down):
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


def _experts(layer, x_ND):
    """Each expert computes a fixed number of rows; rows beyond it are dropped."""
    scores_NE = jax.nn.sigmoid((x_ND @ layer["router"]).astype(jnp.float32))
    weight_NK, chosen_NK = jax.lax.top_k(scores_NE, EXPERTS_PER_TOKEN)
    expert_P = chosen_NK.reshape(-1)
    capacity = ROWS // EXPERTS
    order_P = jnp.argsort(expert_P)
    starts_E = jnp.searchsorted(expert_P[order_P], jnp.arange(EXPERTS))
    slot_EC = starts_E[:, None] + jnp.arange(capacity)
    pair_EC = order_P[jnp.minimum(slot_EC, expert_P.size - 1)]
    valid_EC = (slot_EC < expert_P.size) & (expert_P[pair_EC] == jnp.arange(EXPERTS)[:, None])
    rows_ECD = x_ND[pair_EC // EXPERTS_PER_TOKEN]
    out_ECD = jax.vmap(_gated)(rows_ECD, layer["experts_gate_up"], layer["experts_down"])
    weight_EC = jnp.where(valid_EC, weight_NK.reshape(-1)[pair_EC], 0.0).astype(x_ND.dtype)
    token_P = (pair_EC // EXPERTS_PER_TOKEN).reshape(-1)
    return jnp.zeros_like(x_ND).at[token_P].add((out_ECD * weight_EC[..., None]).reshape(-1, WIDTH))


def _block(layer, x_BLD):
    y_BLD = _norm(x_BLD, layer["norm_attention"])

    def heads(w, count):
        return (y_BLD @ w).reshape(*y_BLD.shape[:2], count, HEAD_DIM)

    attended = jax.nn.dot_product_attention(
        heads(layer["w_q"], HEADS),
        heads(layer["w_k"], KV_HEADS),
        heads(layer["w_v"], KV_HEADS),
        is_causal=True,
        implementation="xla",  # with all scores of a layer, as Grug's attention on GPUs in May 2026
    )
    x_BLD = x_BLD + attended.reshape(*x_BLD.shape[:2], -1) @ layer["w_o"]
    y_ND = _norm(x_BLD, layer["norm_mlp"]).reshape(-1, WIDTH)
    mlp_ND = _experts(layer, y_ND) + _gated(y_ND, layer["shared_gate_up"], layer["shared_down"])
    return x_BLD + mlp_ND.reshape(x_BLD.shape)


def _loss(params, tokens_BL):
    x_BLD = params["embed"][tokens_BL[:, :-1]]
    for layer in params["layers"]:
        x_BLD = jax.checkpoint(_block)(layer, x_BLD)
    x_ND = _norm(x_BLD, params["norm"]).reshape(-1, WIDTH)

    @jax.checkpoint
    def chunk_loss(total, chunk):
        x_CD, target_C = chunk
        logits_CV = (x_CD @ params["head"]).astype(jnp.float32)
        return total + optax.softmax_cross_entropy_with_integer_labels(logits_CV, target_C).sum(), None

    chunks = x_ND.reshape(-1, CHUNK, WIDTH), tokens_BL[:, 1:].reshape(-1, CHUNK)
    return jax.lax.scan(chunk_loss, jnp.zeros(()), chunks)[0] / x_ND.shape[0]


def step_of(parameters: float, optimizer: str = "adam"):
    """Returns (step, arguments) of a donated update of a model with about this number of parameters.

    optimizer: a key of `OPTIMIZERS`; gradients are clipped by their global norm, as Levanter does by default.
    """
    transform = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZERS[optimizer](1e-4))
    params = jax.tree.map(
        lambda shape: spec(shape, jnp.bfloat16), parameter_shapes(parameters), is_leaf=lambda x: isinstance(x, tuple)
    )

    def step(params, state, tokens_BL):
        loss, grads = jax.value_and_grad(_loss)(params, tokens_BL)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.eval_shape(transform.init, params)
    return jax.jit(step, donate_argnums=(0, 1)), (params, state, spec((SEQUENCES, LENGTH + 1), jnp.int32))


def parameter_count(parameters: float) -> int:
    """Returns the exact number of parameters of `step_of(parameters)`."""
    leaves = jax.tree.leaves(parameter_shapes(parameters), is_leaf=lambda x: isinstance(x, tuple))
    return sum(map(math.prod, leaves))
