"""A pool of pages with the keys and values of many sequences, which a page table per sequence indexes.

Based on PagedAttention (Kwon et al. 2023, arXiv 2309.06180): a sequence has no contiguous range of memory, only pages
of PAGE positions, so at most one page per sequence is partly unused. Suffixes: N pages of the pool, P pages of a
sequence, G heads of keys, S positions of a sequence.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Positions per page.
PAGE = 16
# The scratch page: keys and values of padding tokens are written there.
NOBODY = 0


@partial(jax.tree_util.register_dataclass, data_fields=["positions_BT", "table_BP"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class View:
    """The T tokens per sequence that a step computes, and the pages of their sequences. A page stores the keys and
    values of PAGE consecutive positions of one sequence.

    Fields:
      positions_BT: int32, the position of each token in its sequence, -1 for padding.
      table_BP: int32, the page table: the index of each of a sequence's P pages in the pool. Positions without a page
        have the index NOBODY, the scratch page, whose content is never used.
    """

    positions_BT: Any  # jax.Array in a step, np.ndarray before it, ShapeDtypeStruct if a step is only compiled
    table_BP: Any

    @property
    def places(self) -> tuple[jax.Array, jax.Array]:
        """Where each token's keys and values are stored: (page index, offset in the page), int32 [B, T] each. Padding
        tokens are stored in the scratch page, which no sequence uses."""
        positions_BT = jnp.maximum(self.positions_BT, 0)
        pages_BT = jnp.take_along_axis(self.table_BP, positions_BT // PAGE, axis=1)
        return jnp.where(self.positions_BT < 0, NOBODY, pages_BT), positions_BT % PAGE


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_scales", "value_scales"],
    meta_fields=["compute"],
)
@dataclasses.dataclass(frozen=True)
class PagePool:
    """The KV-cache pages of one layer. A page has the keys and values of PAGE positions of one sequence.

    Fields:
      keys: [N, PAGE, G, K], for N pages, G key heads and K elements per key.
      values: [N, PAGE, G, V]; None if the values are the first V elements of the keys (latent attention).
      key_scales, value_scales: float32 [N, PAGE, G] if keys and values are stored in 8 bits, else None.
      compute: the dtype in which keys and values are returned.
    """

    keys: jax.Array
    values: jax.Array | None
    key_scales: jax.Array | None
    value_scales: jax.Array | None
    compute: DTypeLike

    @classmethod
    def zeros(
        cls, pages: int, groups: int, key_width: int, value_width: int, stored: DTypeLike, compute: DTypeLike
    ) -> "PagePool":
        """Returns an empty pool.

        Args:
          pages: number of pages.
          groups: number of key heads.
          key_width, value_width: elements per head; `value_width` is 0 for latent attention.
          stored: dtype of the pages.
          compute: dtype in which keys and values are returned.
        """
        narrow = jnp.dtype(stored).itemsize == 1

        def array(width: int) -> jax.Array:
            return jnp.zeros((pages, PAGE, groups, width), stored)

        def scales(width: int) -> jax.Array | None:
            return jnp.ones((pages, PAGE, groups), jnp.float32) if width and narrow else None

        values = array(value_width) if value_width else None
        return cls(array(key_width), values, scales(key_width), scales(value_width), compute)

    def write(self, k_BTGK: jax.Array, v_BTGV: jax.Array | None, view: View) -> "PagePool":
        """Returns the pool after the keys and values of a step's tokens are written to it. `view`: the positions of the
        tokens and the pages of their sequences."""
        at = view.places
        keys, key_scales = _write_pages(self.keys, self.key_scales, k_BTGK, at)
        if v_BTGV is None or self.values is None:
            return dataclasses.replace(self, keys=keys, key_scales=key_scales)
        values, value_scales = _write_pages(self.values, self.value_scales, v_BTGV, at)
        return PagePool(keys, values, key_scales, value_scales, self.compute)

    def read(self, pages_BP: jax.Array, value_width: int) -> tuple[jax.Array, jax.Array]:
        """Returns the keys [B, S, G, K] and values [B, S, G, V] of B sequences, in the compute dtype. `pages_BP`: the
        indices of each sequence's pages. `value_width`: V."""
        k_BSGK = _read_pages(self.keys, self.key_scales, pages_BP, self.compute)
        if self.values is None:
            return k_BSGK, k_BSGK[..., :value_width]
        return k_BSGK, _read_pages(self.values, self.value_scales, pages_BP, self.compute)


def _write_pages(
    pool: jax.Array, scales: jax.Array | None, new_BTGK: jax.Array, at: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """Writes keys or values `new_BTGK` to `pool` at the places `at`, (page index, offset in the page) of each token.
    Returns the pages and their scales. Pages in 8 bits have one scale per token and head; other pages have None."""
    if scales is None:
        return pool.at[at].set(new_BTGK.astype(pool.dtype)), None
    float32_BTGK = new_BTGK.astype(jnp.float32)
    scale_BTG = jnp.maximum(jnp.abs(float32_BTGK).max(-1), 1e-30) / float(jnp.iinfo(pool.dtype).max)
    narrow_BTGK = jnp.round(float32_BTGK / scale_BTG[..., None])
    return pool.at[at].set(narrow_BTGK.astype(pool.dtype)), scales.at[at].set(scale_BTG)


def _read_pages(pool: jax.Array, scales: jax.Array | None, pages_BP: jax.Array, dtype: DTypeLike) -> jax.Array:
    # The pages of each sequence are concatenated.
    B, P = pages_BP.shape
    pages = pool[pages_BP].reshape(B, P * PAGE, *pool.shape[2:])
    if scales is None:
        return pages.astype(dtype)
    return (pages.astype(jnp.float32) * scales[pages_BP].reshape(B, P * PAGE, -1, 1)).astype(dtype)
