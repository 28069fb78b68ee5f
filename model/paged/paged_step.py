"""One step of generation: runs a few tokens of several sequences through the model, with one pool of pages per
layer."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from bytescope.model.attention.attention_kernels import scoring_of
from bytescope.model.block import Block
from bytescope.model.model_config import ModelConfig
from bytescope.model.paged.page_pool import PagePool, View
from bytescope.model.paged.paged_attention import attend
from bytescope.model.runs import layers_of, stack_of
from bytescope.model.segments import Packed
from bytescope.model.transformer import Transformer


def make_pools(config: ModelConfig, pages: int, stored: DTypeLike, compute: DTypeLike) -> list[PagePool]:
    """Returns an empty page pool (KV cache) for each layer. With latent attention, a pool stores the latent and the
    rotated part of the key as one head.

    Args:
      pages: number of pages in a pool.
      stored, compute: dtypes of the stored and of the returned keys and values.
    """
    if config.attention_kind == "mla":
        shape = 1, config.mla_kv_rank + config.mla_d_rope, 0
    else:
        shape = config.n_kv_heads, config.d_head, config.d_head
    return [PagePool.zeros(pages, *shape, stored, compute) for _ in range(config.n_layers)]


def step(
    model: Transformer, tokens_BT: jax.Array, view: View, pools: Sequence[PagePool]
) -> tuple[jax.Array, list[PagePool]]:
    """Computes new tokens of several sequences with a paged KV cache. Returns the output of the last block after the
    final norm, [B, T, D], and the page pools with the keys and values of the tokens added.

    Layers are unrolled, because a loop over stacked layers would copy the pages of a layer out of the stack and back.

    Args:
      tokens_BT: int32, T tokens of each of B sequences.
      view: positions of the tokens, and the pages of their sequences.
      pools: the page pool of each layer.
    """
    config = model.config
    packed = Packed(jnp.ones_like(tokens_BT), jnp.maximum(view.positions_BT, 0))
    x_BTD, written_pools = model.begin(tokens_BT, None, packed), []
    for block, pool in zip(_iterate_blocks(model), pools, strict=True):

        def core(q_BTHK, k_BTGK, v_BTGV, pool=pool):
            written_pools.append(pool.write(k_BTGK, v_BTGV, view))
            return attend(
                q_BTHK,
                written_pools[-1],
                view,
                scoring=scoring_of(config),
                width=config.score_width,
                value_width=v_BTGV.shape[-1] if v_BTGV is not None else config.mla_kv_rank,
            )

        x_BTD = block.cached(x_BTD, packed, core)
    return model.finish(x_BTD), written_pools


def unstack_layers(model: Transformer) -> Transformer:
    """Replaces the stacked layers of `model` by separate layers, in place, and returns `model`. If its layers are not
    stacked (`scan` is False), nothing changes. On a CPU, a step would copy each layer's weights out of the stack.
    """
    if not model.config.scan:
        return model
    blocks = nnx.List(list(_iterate_blocks(model)))
    for stack in {stack_of(model.config, layer) for layer in range(model.config.n_layers)}:
        delattr(model, stack)
    model.blocks, model.config = blocks, dataclasses.replace(model.config, scan=False)
    return model


def _iterate_blocks(model: Transformer) -> Iterator[Block]:
    config = model.config
    if not config.scan:
        for layer, block in enumerate(model.blocks):
            yield block.set(layer, regather=False)
        return
    names = {stack_of(config, layer) for layer in range(config.n_layers)}
    stacks = {name: nnx.split(getattr(model, name)) for name in names}
    for layer in range(config.n_layers):
        name = stack_of(config, layer)
        graph, state = stacks[name]
        row = layers_of(config, name).index(layer)
        own = jax.tree.map(lambda leaf, row=row: leaf[row], state)
        yield nnx.merge(graph, own).set(layer, regather=False)
