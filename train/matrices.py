"""Parameters as matrices, by name: what optimizers that look at rows and columns or at blocks of a matrix go by.

Leading axes (stacked layers) are a batch of matrices, so scanned and unrolled layers are updated alike.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib


class Matrix(NamedTuple):
    """inputs, outputs: how many of the last axes are a matrix' rows and its columns.

    block: axes that blocks of 8-bit state extend along, first to last: those that ZeRO does not divide, but in a
    table the width, so that a rare token does not share a block with a frequent one. hidden: between embedding and head.
    """

    inputs: int
    outputs: int
    block: tuple[int, ...]
    hidden: bool = True


_PROJECTION, _UP, _DOWN = Matrix(1, 2, (-1, -2)), Matrix(1, 1, (-1,)), Matrix(1, 1, (-2,))
MATRICES = {
    "w_q": _PROJECTION, "w_k": _PROJECTION, "w_v": _PROJECTION, "w_o": Matrix(2, 1, (-2, -3)),
    "w_up": _UP, "w_gate": _UP, "w_down": _DOWN,
    "w_token": Matrix(1, 1, (-1,), hidden=False), "w_position": Matrix(1, 1, (-1,), hidden=False),
    "w_head": Matrix(1, 1, (-2,), hidden=False),
}


def matrix_of(path: tuple) -> Matrix | None:
    """The row of a parameter by its path; None for norms, biases and whatever else is no matrix."""
    return MATRICES.get(str(getattr(path[-1], "key", "")))


def as_matrices(path: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter as a batch of matrices [N, rows, columns], or of vectors [N, size]."""
    if (matrix := matrix_of(path)) is None:
        return (math.prod(shape[:-1]), shape[-1])
    first = len(shape) - matrix.inputs - matrix.outputs
    return (math.prod(shape[:first]), math.prod(shape[first: first + matrix.inputs]), math.prod(shape[-matrix.outputs:]))


def each_matrix(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` applied to every matrix alone: its state is a tree like the parameters, batched along a first axis."""
    def batched(path, leaf):
        return leaf.reshape(as_matrices(path, leaf.shape))

    def init(params):
        return jax.tree_util.tree_map_with_path(lambda path, leaf: jax.vmap(inner.init)(batched(path, leaf)), params)

    def update(updates, state, params=None):
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        moved = [jax.vmap(inner.update)(batched(path, grad), own, batched(path, param))
                 for (path, grad), own, param in zip(leaves, tree.flatten_up_to(state), jax.tree.leaves(params))]
        return (tree.unflatten([new.reshape(grad.shape) for (_, grad), (new, _) in zip(leaves, moved)]),
                tree.unflatten([own for _, own in moved]))

    return optax.GradientTransformation(init, update)


def adafactor() -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235) without momentum: a second moment by rows and columns of
    each matrix, whole for vectors, 1 - t^-0.8 of it kept, and updates of RMS 1 at most.

    Left out is the paper's scaling by the parameter's own RMS: the learning rate is absolute, as everywhere here.
    """
    return each_matrix(optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=1),
                                   optax.clip_by_block_rms(1.0)))


def muon(momentum: float, rest: optax.GradientTransformation) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024, github.com/KellerJordan/Muon) for hidden matrices, `rest` for all other parameters.

    The Nesterov momentum of each matrix, orthogonalized by five Newton-Schulz iterations and scaled by
    0.2 sqrt(max(rows, columns)), which gives it the RMS of an update of AdamW's and lets both share a learning rate
    and a decay (Liu et al. 2025, arXiv 2502.16982).
    """
    def numbers(updates):
        def of(path, _):
            matrix = matrix_of(path)
            rows = tuple(range(-matrix.inputs - matrix.outputs, -matrix.outputs))
            return contrib.MuonDimensionNumbers(rows, tuple(range(-matrix.outputs, 0)))

        return jax.tree_util.tree_map_with_path(of, updates)

    def scale(path, update):
        return 0.2 * math.sqrt(max(as_matrices(path, update.shape)[1:])) * update

    def label(path, _):
        matrix = matrix_of(path)
        return "muon" if matrix and matrix.hidden else "rest"

    hidden = optax.chain(contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=numbers),
                         _stateless(lambda updates: jax.tree_util.tree_map_with_path(scale, updates)))
    return optax.partition({"muon": hidden, "rest": rest},
                           lambda params: jax.tree_util.tree_map_with_path(label, params))


def _stateless(function: Callable[[Any], Any]) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: function(updates))
