"""One step of generation: runs a few tokens of several sequences through the model, with one pool of pages per layer.

A layer writes the keys and values of the tokens into its pool first. Then each token attends to all positions up to its
own. Suffixes are those of page_pool.py, and R is the number of queries that share a head of keys.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from bytescope.model.attention.attention_kernels import scoring_of
from bytescope.model.attention.chunked import Scoring
from bytescope.model.block import Block
from bytescope.model.model_config import ModelConfig
from bytescope.model.paged.page_pool import NOBODY, PAGE, PagePool, View
from bytescope.model.runs import layers_of, stack_of
from bytescope.model.segments import Packed
from bytescope.model.transformer import Transformer

# Number of pages that attention reads at once.
BLOCK = 8


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


def attend(
    q_BTHK: jax.Array, pool: PagePool, view: View, *, scoring: Scoring, width: int, value_width: int
) -> jax.Array:
    """Computes attention of new tokens to the keys and values in a page pool, BLOCK pages at a time with a running
    softmax (Dao et al. 2022, arXiv 2205.14135). Returns the context [B, T, H, V] in the dtype of the queries; rows of
    padding tokens are arbitrary.

    The longest sequence determines the number of loop iterations.

    Args:
      q_BTHK: queries of the tokens.
      pool: pages with the keys and values of one layer, the tokens' own included.
      view: positions of the tokens, and the pages of their sequences.
      scoring: turns query-key dot products into attention scores.
      width: head width that scales the scores.
      value_width: V, elements of a value.
    """
    B, T, H, K = q_BTHK.shape
    G, P = pool.keys.shape[2], view.table_BP.shape[1]
    count = min(BLOCK, P)
    table_BP = jnp.pad(view.table_BP, ((0, 0), (0, -P % count)), constant_values=NOBODY)
    q_BTGRK = q_BTHK.astype(pool.compute).reshape(B, T, G, H // G, K)
    lowest = jnp.finfo(jnp.float32).min

    def turn(i: jax.Array, carry: tuple) -> tuple:
        sums_BGRTV, most_BGRT, total_BGRT = carry
        k_BSGK, v_BSGV = pool.read(jax.lax.dynamic_slice_in_dim(table_BP, i * count, count, 1), value_width)
        products = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK, preferred_element_type=jnp.float32)
        positions_S = i * count * PAGE + jnp.arange(count * PAGE)
        allowed_BTS = positions_S[None, None] <= view.positions_BT[..., None]
        scores_BGRTS = jnp.where(allowed_BTS[:, None, None], scoring(products, width), lowest)
        above_BGRT = jnp.maximum(most_BGRT, scores_BGRTS.max(-1))
        probs_BGRTS = jnp.exp(scores_BGRTS - above_BGRT[..., None])
        kept_BGRT = jnp.exp(most_BGRT - above_BGRT)
        added_BGRTV = jnp.einsum(
            "bgrts,bsgv->bgrtv", probs_BGRTS.astype(v_BSGV.dtype), v_BSGV, preferred_element_type=jnp.float32
        )
        return (
            sums_BGRTV * kept_BGRT[..., None] + added_BGRTV,
            above_BGRT,
            total_BGRT * kept_BGRT + probs_BGRTS.sum(-1),
        )

    rows = (B, G, H // G, T)
    start = jnp.zeros((*rows, value_width), jnp.float32), jnp.full(rows, lowest), jnp.zeros(rows, jnp.float32)
    turns = view.positions_BT.max() // (count * PAGE) + 1
    sums_BGRTV, _, total_BGRT = jax.lax.fori_loop(0, turns, turn, start)
    context_BGRTV = sums_BGRTV / jnp.maximum(total_BGRT, 1e-30)[..., None]
    return jnp.moveaxis(context_BGRTV, 3, 1).reshape(B, T, H, -1).astype(pool.compute)


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
