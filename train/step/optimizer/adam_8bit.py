"""AdamW with 8-bit block-wise moments, after Dettmers et al. 2022 (arXiv 2110.02861). optax has none.

A moment is stored as one byte per parameter, in the parameter's shape and with its sharding, and one float32 scale per
block: the largest magnitude. Differences from the paper:

- Blocks are 128 elements along one axis of a matrix, not 2048 of the flattened array. They do not depend on the mesh,
  and along the axes chosen in train/step/optimizer/param_matrices.py devices seldom share a block.
- Codes are at the ends of the paper's dynamic intervals, not at their centers, so a block's largest value is exact.
- The second moment is stored as its square root, which the update divides by and which has half the orders of
  magnitude. A nonzero value is never stored as zero.
- Embedding tables are 8-bit too, because blocks along the width do not mix tokens. As in the paper, matrices of fewer
  than 4096 elements, norms and biases stay float32.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bytescope.train.step.optimizer.param_matrices import by_layer, matrix_of

BLOCK, SHORT_BLOCK, MIN_SIZE = 128, 64, 4096  # numbers of elements

# The dynamic map: zero and seven decades up to 1, each with twice the codes of the decade below. Magnitudes of signed
# codes end at 127, unsigned codes at 255. Between the decades' ends the map is linear.
_DECADES = (0.0, *(10.0 ** (k - 6) for k in range(7)))
_SIGNED = (0.0, *(2.0 ** (k + 1) - 1 for k in range(7)))
_UNSIGNED = (0.0, *(2.0 ** (k + 2) - 1 for k in range(7)))


class EightBitState(NamedTuple):
    """The moments of Adam, quantized to 8 bits.

    Fields:
      count: number of updates, int32.
      mu, root_nu: first moment and square root of the second moment, trees with the structure of the parameters. Leaves
        are int8 (mu) and uint8 (root_nu) codes, or float32 for parameters that are not quantized.
      mu_scale, nu_scale: float32 scales of the codes, one per block of elements (see `block_shape`); `MaskedNode` for
        parameters that are not quantized.
    """

    count: jax.Array  # type: ignore[assignment]  # the name that optax uses; it hides tuple.count
    mu: Any
    root_nu: Any
    mu_scale: Any
    nu_scale: Any


def _interpolate_linearly(x: jax.Array, xs: Sequence[float], ys: Sequence[float]) -> jax.Array:
    # A sum of clipped ramps, because compilers can fuse a sum but not a table look-up.
    ramps = [(y1 - y0) / (x1 - x0) * jnp.clip(x - x0, 0.0, x1 - x0) for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:])]
    return sum(ramps[1:], ramps[0])


def encode_signed(x: jax.Array) -> jax.Array:
    """Rounds each number in [-1, 1] to the nearest value of a dynamic 8-bit format, whose steps are finer near 0.
    Returns int8 codes in [-127, 127]."""
    return jnp.copysign(jnp.round(_interpolate_linearly(jnp.abs(x), _DECADES, _SIGNED)), x).astype(jnp.int8)


def decode_signed(codes: jax.Array) -> jax.Array:
    """Inverse of `encode_signed`: int8 codes -> float32 numbers in [-1, 1]."""
    x = codes.astype(jnp.float32)
    return jnp.copysign(_interpolate_linearly(jnp.abs(x), _SIGNED, _DECADES), x)


def encode_unsigned(x: jax.Array) -> jax.Array:
    """Rounds each number in [0, 1] to the nearest value of a dynamic 8-bit format, whose steps are finer near 0.
    Returns uint8 codes. Numbers above 0 never get code 0, because the optimizer divides by the decoded numbers."""
    code = jnp.round(_interpolate_linearly(x, _DECADES, _UNSIGNED))
    return jnp.where(x > 0, jnp.maximum(code, 1.0), 0.0).astype(jnp.uint8)


def decode_unsigned(codes: jax.Array) -> jax.Array:
    """Inverse of `encode_unsigned`: uint8 codes -> float32 numbers in [0, 1]."""
    return _interpolate_linearly(codes.astype(jnp.float32), _UNSIGNED, _DECADES)


def block_shape(path: tuple, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape of the blocks of a parameter whose 8-bit moments share one scale, for example (128, 1) for a
    matrix of shape (1024, 512). Returns None if the moments stay float32, as for small parameters and vectors.

    The block shape divides `shape` and has as many axes. `MatrixAxes.block` lists the axes along which blocks of a
    parameter may extend. Blocks extend up to 128 elements along the first of these axes. If that axis gives fewer than
    64 elements, they extend along the next axis too.

    Args:
      path: path of the parameter in the tree of parameters.
      shape: shape of the parameter.
    """
    matrix = matrix_of(path)
    if matrix is None or math.prod(shape[len(shape) - matrix.inputs - matrix.outputs :]) < MIN_SIZE:
        return None
    block = [1] * len(shape)
    for limit, axis in zip((BLOCK, *[SHORT_BLOCK] * len(matrix.block)), matrix.block):
        block[axis] = math.gcd(shape[axis], max(limit // math.prod(block), 1))
    return tuple(block)


def _split_into_blocks(x: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """Splits every axis of `x` into two axes, (number of blocks, elements of a block). For example, [256, 8] with the
    block shape (128, 1) becomes [2, 128, 8, 1]."""
    return x.reshape([n for size, own in zip(x.shape, block) for n in (size // own, own)])


def _add_block_axes(scale: jax.Array) -> jax.Array:
    # [2, 8] -> [2, 1, 8, 1], which broadcasts against the result of `_split_into_blocks`.
    return scale.reshape([n for size in scale.shape for n in (size, 1)])


def quantize(x: jax.Array, block: tuple[int, ...], encode) -> tuple[jax.Array, jax.Array]:
    """Quantizes `x` to 8 bits. Returns codes in the shape of `x` and float32 scales, one per block. The scale of a
    block is its largest magnitude.

    Args:
      block: shape of a block of elements that share a scale. It divides the shape of `x`.
      encode: `encode_signed` or `encode_unsigned`.
    """
    blocks = _split_into_blocks(x, block)
    scale = jnp.max(jnp.abs(blocks), axis=range(1, blocks.ndim, 2))
    inverse = jnp.where(scale > 0, 1.0 / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny), 0.0)
    return encode(blocks * _add_block_axes(inverse)).reshape(x.shape), scale


def dequantize(codes: jax.Array, scale: jax.Array, block: tuple[int, ...], decode) -> jax.Array:
    """Returns the float32 numbers that `codes` represent, in the same shape.

    Args:
      codes: 8-bit codes from `quantize`.
      scale: scale of each block.
      block: shape of a block of elements that share a scale.
      decode: `decode_signed` or `decode_unsigned`, the inverse of the `encode` that was used.
    """
    return (decode(_split_into_blocks(codes, block)) * _add_block_axes(scale)).reshape(codes.shape)


def scale_by_adam_8bit(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Returns a transformation like `optax.scale_by_adam` that stores the moments in 8 bits.

    The update is computed from the new moments before they are quantized. `b1`, `b2`: decay of the first and the second
    moment. `eps`: added to the root of the second moment.
    """

    def init(params):
        blocks = [block_shape(path, leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
        leaves, tree = jax.tree.flatten(params)

        def codes(dtype):
            return tree.unflatten(
                [jnp.zeros(leaf.shape, dtype if block else jnp.float32) for leaf, block in zip(leaves, blocks)]
            )

        def scales():
            return tree.unflatten(
                [
                    jnp.zeros([size // own for size, own in zip(leaf.shape, block)]) if block else optax.MaskedNode()
                    for leaf, block in zip(leaves, blocks)
                ]
            )

        return EightBitState(jnp.zeros((), jnp.int32), codes(jnp.int8), codes(jnp.uint8), scales(), scales())

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        first, second = 1.0 - jnp.float32(b1) ** count, 1.0 - jnp.float32(b2) ** count

        def one(grad, mu, root_nu):
            mu = b1 * mu + (1.0 - b1) * grad
            root_nu = jnp.sqrt(b2 * jnp.square(root_nu) + (1.0 - b2) * jnp.square(grad))
            return (mu / first / (root_nu / jnp.sqrt(second) + eps)).astype(grad.dtype), mu, root_nu

        def quantized(grad, mu, root_nu, mu_scale, nu_scale):
            block = tuple(size // blocks for size, blocks in zip(mu.shape, mu_scale.shape))
            step, mu, root_nu = one(
                grad,
                dequantize(mu, mu_scale, block, decode_signed),
                dequantize(root_nu, nu_scale, block, decode_unsigned),
            )
            mu, mu_scale = quantize(mu, block, encode_signed)
            root_nu, nu_scale = quantize(root_nu, block, encode_unsigned)
            return step, mu, root_nu, mu_scale, nu_scale

        def update_parameter(path, grad, mu, root_nu, mu_scale, nu_scale):
            if block_shape(path, grad.shape):
                return by_layer(quantized, path, grad, mu, root_nu, mu_scale, nu_scale)
            return *one(grad, mu, root_nu), mu_scale, nu_scale

        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        columns = [tree.flatten_up_to(kept) for kept in state[1:]]
        rows = [update_parameter(path, grad, *own) for (path, grad), *own in zip(leaves, *columns)]
        step, *kept = [tree.unflatten([row[place] for row in rows]) for place in range(len(state))]
        return step, EightBitState(count, *kept)

    return optax.GradientTransformation(init, update)
