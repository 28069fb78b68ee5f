"""A pool of pages: keys and values of many sequences, found by a table of pages for each.

After PagedAttention (Kwon et al. 2023, arXiv 2309.06180): a sequence owns no range of memory, only pages of PAGE
positions, so that what nobody uses is at most one page a sequence. Suffixes: N pages of the pool, P pages of a
sequence, G heads of keys, S positions of a sequence.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Positions of a page.
PAGE = 16
# The page that is nobody's: what padding makes is written there.
NOBODY = 0


@partial(jax.tree_util.register_dataclass, data_fields=["positions_BT", "table_BP"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class View:
    """Which tokens a step computes, and in which pages their sequences lie.

    Fields:
      positions_BT: int32, the place of each token in its sequence; -1 for padding.
      table_BP: int32, the page of each PAGE positions of a sequence; NOBODY where it has none.
    """

    positions_BT: Any  # jax.Array in a step, np.ndarray on its way there, ShapeDtypeStruct where a step is described
    table_BP: Any

    @property
    def places(self) -> tuple[jax.Array, jax.Array]:
        """(page, offset in it) of each token, int32 [B, T]."""
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
    """The pages of one layer.

    Fields:
      keys: [N, PAGE, G, K]. values: [N, PAGE, G, V]; None where they are the first V numbers of the keys (latents).
      key_scales, value_scales: float32 [N, PAGE, G] where these are stored in 8 bits, else None.
      compute: the dtype in which they are read.
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
        """A pool without contents. value_width: 0 for latents."""
        narrow = jnp.dtype(stored).itemsize == 1

        def array(width: int) -> jax.Array:
            return jnp.zeros((pages, PAGE, groups, width), stored)

        def scales(width: int) -> jax.Array | None:
            return jnp.ones((pages, PAGE, groups), jnp.float32) if width and narrow else None

        values = array(value_width) if value_width else None
        return cls(array(key_width), values, scales(key_width), scales(value_width), compute)

    def write(self, k_BTGK: jax.Array, v_BTGV: jax.Array | None, view: View) -> "PagePool":
        """The pool with the keys and values of the tokens of a step."""
        at = view.places
        keys, key_scales = _put(self.keys, self.key_scales, k_BTGK, at)
        if v_BTGV is None or self.values is None:
            return dataclasses.replace(self, keys=keys, key_scales=key_scales)
        values, value_scales = _put(self.values, self.value_scales, v_BTGV, at)
        return PagePool(keys, values, key_scales, value_scales, self.compute)

    def read(self, pages_BP: jax.Array, value_width: int) -> tuple[jax.Array, jax.Array]:
        """Keys [B, S, G, K] and values [B, S, G, V] of pages, in the compute dtype."""
        k_BSGK = _get(self.keys, self.key_scales, pages_BP, self.compute)
        if self.values is None:
            return k_BSGK, k_BSGK[..., :value_width]
        return k_BSGK, _get(self.values, self.value_scales, pages_BP, self.compute)


def _put(
    pool: jax.Array, scales: jax.Array | None, new_BTGK: jax.Array, at: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """The pool and scales with what is new at (page, offset); narrow numbers have a scale for each head of a token."""
    if scales is None:
        return pool.at[at].set(new_BTGK.astype(pool.dtype)), None
    integers = jnp.issubdtype(pool.dtype, jnp.integer)
    most = float(jnp.iinfo(pool.dtype).max if integers else jnp.finfo(pool.dtype).max)
    wide_BTGK = new_BTGK.astype(jnp.float32)
    scale_BTG = jnp.maximum(jnp.abs(wide_BTGK).max(-1), 1e-30) / most
    narrow_BTGK = wide_BTGK / scale_BTG[..., None]
    if integers:
        narrow_BTGK = jnp.round(narrow_BTGK)
    return pool.at[at].set(narrow_BTGK.astype(pool.dtype)), scales.at[at].set(scale_BTG)


def _get(pool: jax.Array, scales: jax.Array | None, pages_BP: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The pages of each sequence one behind the other, [B, S, G, K]."""
    B, P = pages_BP.shape
    found = pool[pages_BP].reshape(B, P * PAGE, *pool.shape[2:])
    if scales is None:
        return found.astype(dtype)
    return (found.astype(jnp.float32) * scales[pages_BP].reshape(B, P * PAGE, -1, 1)).astype(dtype)
