"""A training step in Equinox, compiled for GPUs that are not there.

    bytescope report equinox_gpt.py:program h100:8
    bytescope compare equinox_gpt.py:program h100:8 --grid=remat=none,full --grid=fsdp=false,true

Replace `Gpt` and `train_step` by your own: models made by `eqx.filter_eval_shape` and steps under `eqx.filter_jit` are
read as they are. Needs equinox and optax.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, heads, key):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x_LD):
        causal_LL = jnp.tril(jnp.ones((len(x_LD), len(x_LD)), bool))
        y_LD = jax.vmap(self.norm1)(x_LD)
        x_LD = x_LD + self.attention(y_LD, y_LD, y_LD, causal_LL)
        return x_LD + jax.vmap(lambda x_D: self.down(jax.nn.gelu(self.up(self.norm2(x_D)))))(x_LD)


class Gpt(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    remat: bool = eqx.field(static=True)

    def __init__(self, vocab, width, layers, heads, remat, key):
        keys = jax.random.split(key, layers + 2)
        self.embedding = eqx.nn.Embedding(vocab, width, key=keys[0])
        self.blocks = [Block(width, heads, key) for key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocab, use_bias=False, key=keys[1])
        self.remat = remat

    def __call__(self, tokens_L):
        x_LD = jax.vmap(self.embedding)(tokens_L)
        for block in self.blocks:
            x_LD = (eqx.filter_checkpoint(block) if self.remat else block)(x_LD)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x_LD))


def program(
    batch=32, length=1024, width=1024, layers=12, heads=16, vocab=50257, remat="none", fsdp=False, dtype="bfloat16"
):
    """Returns the step with its arguments, (model, opt_state, tokens), data-parallel over all devices.

    Parameters are float32, the model computes in bfloat16.

    Args:
        batch: sequences per step, over all devices.
        remat: none, or full: `eqx.filter_checkpoint` around each block.
        fsdp: shards every array of the state along its first dimension that the devices divide.
    """
    optimizer = optax.adamw(3e-4)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def create(key):
        model = Gpt(vocab, width, layers, heads, remat == "full", key)
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def place(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        divided = [number for number, size in enumerate(leaf.shape) if fsdp and size % mesh.size == 0]
        spec = P(*[None] * divided[0], "data") if divided else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(place, eqx.filter_eval_shape(create, jax.random.PRNGKey(0)))
    shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), state)

    @eqx.filter_jit(donate="all-except-first")
    def train_step(tokens_BL, model, opt_state):
        @eqx.filter_value_and_grad
        def loss(model):
            cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, model)
            logits_BLV = jax.vmap(cast)(tokens_BL[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, tokens_BL[:, 1:]).mean()

        value, grads = loss(model)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return value, *eqx.filter_shard((eqx.apply_updates(model, updates), opt_state), shardings)

    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    return train_step, (tokens, *state)


program.how = ("remat", "fsdp")  # type: ignore[attr-defined]  # read by bytescope compare
