"""Parameters as matrices, by name, for optimizers that work on rows, columns or blocks of a matrix.

Leading axes (stacked layers) are a batch of matrices, so that scanned and unrolled layers get the same update.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bytescope.model.adapters import TARGETS


class MatrixAxes(NamedTuple):
    """Says which axes of a parameter form the rows and which form the columns of a matrix.

    Fields:
      inputs, outputs: the number of axes that form the rows, and the number of axes that form the columns. These are
        the last axes of the parameter.
      block: indices of the axes along which blocks of 8-bit optimizer state extend, in order of preference. A block is
        a group of elements with one scale. ZeRO does not shard these axes. For a token table it is the width, so that
        rare tokens do not share a block with frequent ones.
      hidden: True if the matrix is between embedding and head. muon updates only hidden matrices.
    """

    inputs: int
    outputs: int
    block: tuple[int, ...]
    hidden: bool = True


_PROJECTION, _UP, _DOWN = MatrixAxes(1, 2, (-1, -2)), MatrixAxes(1, 1, (-1,)), MatrixAxes(1, 1, (-2,))
MATRICES = {
    "w_q": _PROJECTION,
    "w_k": _PROJECTION,
    "w_v": _PROJECTION,
    "w_o": MatrixAxes(2, 1, (-2, -3)),
    "w_q_down": _UP,
    "w_kv_down": _UP,
    "w_q_up": _PROJECTION,
    "w_k_up": _PROJECTION,
    "w_v_up": _PROJECTION,
    "w_up": _UP,
    "w_gate": _UP,
    "w_down": _DOWN,
    "w_token": MatrixAxes(1, 1, (-1,), hidden=False),
    "w_position": MatrixAxes(1, 1, (-1,), hidden=False),
    "w_head": MatrixAxes(1, 1, (-2,), hidden=False),
    "w_router": MatrixAxes(1, 1, (-1, -2), hidden=False),
    # Adapters: [inputs, rank] and [rank, outputs].
    **{f"w_{target}_a": MatrixAxes(inputs, 1, (-1,)) for target, inputs in TARGETS.items()},
    **{f"w_{target}_b": _PROJECTION if target in ("q", "k", "v") else _UP for target in TARGETS},
}
# Parameters that are vectors but have several axes -> the number of their trailing axes.
VECTORS = {"b_q": 2, "b_k": 2, "b_v": 2}
# Parameter -> the index of its vocabulary axis, which may be padded.
VOCABULARY = {"w_token": 0, "w_head": 1}


def _name(path: tuple) -> str:
    return str(getattr(path[-1], "key", ""))


def matrix_of(path: tuple) -> MatrixAxes | None:
    """Returns which axes of the parameter at `path` form a matrix. Returns None for parameters that are not matrices,
    such as norms and biases."""
    return MATRICES.get(_name(path))


def as_matrices(path: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape to which a parameter is reshaped: a batch of N matrices [N, rows, columns] or of N vectors [N,
    size]. N is the number of layers if layers are stacked, else 1.

    Matrices of E experts become [N, E, rows, columns]. The experts keep a separate axis, because merged with the
    layers' axis the experts of one device would not be adjacent.
    """
    matrix = matrix_of(path)
    if matrix is None:
        first = len(shape) - VECTORS.get(_name(path), 1)
        return (math.prod(shape[:first]), math.prod(shape[first:]))
    outputs = len(shape) - matrix.outputs
    inputs = outputs - matrix.inputs
    matrix_shape = (math.prod(shape[inputs:outputs]), math.prod(shape[outputs:]))
    if _is_expert_matrix(path):
        return (math.prod(shape[: inputs - 1]), shape[inputs - 1], *matrix_shape)
    return (math.prod(shape[:inputs]), *matrix_shape)


def by_layer(function: Callable[..., tuple], path: tuple, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns `function(*arrays)` for arrays of one parameter, such as its gradient and momentum. If they have a
    leading axis of stacked layers, the function is applied to one layer at a time. Results have the shapes of the
    arrays.

    `path` is the path of the parameter, whose name must be in MATRICES. The loop works in place, so memory that
    `function` allocates exists for one layer at a time. The experts of a layer are computed together: they are sharded
    over devices, and a loop over experts would gather each of them.
    """
    matrix = MATRICES[_name(path)]
    stacked = arrays[0].ndim - matrix.inputs - matrix.outputs
    if not stacked:
        return function(*arrays)
    if stacked == 1 and _is_expert_matrix(path):
        return jax.vmap(function)(*arrays)

    def layer(index, stacks):
        old = [jax.lax.dynamic_index_in_dim(stack, index, keepdims=False) for stack in stacks]
        new = by_layer(function, path, *old)
        return tuple(jax.lax.dynamic_update_index_in_dim(stack, own, index, 0) for stack, own in zip(stacks, new))

    return jax.lax.fori_loop(0, arrays[0].shape[0], layer, arrays)


def _is_expert_matrix(path: tuple) -> bool:
    keys = [str(getattr(key, "key", "")) for key in path]
    return "experts" in keys and keys[-1] != "w_router"


def each_matrix(
    inner: Callable[[int], optax.GradientTransformation], vocabulary: int | None = None
) -> optax.GradientTransformation:
    """Returns a transformation that applies `inner(elements)` to every matrix and vector separately, also to every
    layer of stacked layers.

    The state is a tree with the structure of the parameters. Its leaves have a leading axis of layers, of size 1 if
    layers are not stacked. Expert parameters also have an axis of experts.

    Args:
      inner: (number of elements of the matrix, without vocabulary padding) -> the transformation of the matrix.
      vocabulary: number of tokens in the vocabulary; None if the embedding table has no padding rows.
    """

    def rule(path, shape):
        batched = as_matrices(path, shape)
        batches = len(batched) - (2 if matrix_of(path) else 1)
        elements = math.prod(batched[batches:])
        if vocabulary is not None and _name(path) in VOCABULARY:
            elements = elements // shape[VOCABULARY[_name(path)]] * vocabulary
        return inner(elements), batched, batches

    def init(params):
        def one(path, leaf):
            own, batched, batches = rule(path, leaf.shape)
            zeros = jnp.zeros(batched, leaf.dtype)  # parameters may be abstract here
            return _vmap_leading_axes(own.init, batches)(zeros)

        return jax.tree_util.tree_map_with_path(one, params)

    def update(updates, state, params=None):
        def one(path, grad, own, param):
            if isinstance(grad, optax.MaskedNode):  # not part of this update
                return grad, own
            inner, batched, batches = rule(path, grad.shape)
            new, own = _vmap_leading_axes(inner.update, batches)(grad.reshape(batched), own, param.reshape(batched))
            return new.reshape(grad.shape), own

        leaves, tree = jax.tree_util.tree_flatten_with_path(
            updates, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
        )
        moved = [
            one(path, grad, own, param)
            for (path, grad), own, param in zip(leaves, tree.flatten_up_to(state), tree.flatten_up_to(params))
        ]
        return tree.unflatten([new for new, _ in moved]), tree.unflatten([own for _, own in moved])

    return optax.GradientTransformation(init, update)


def _vmap_leading_axes(function: Callable, batches: int) -> Callable:
    return _vmap_leading_axes(jax.vmap(function), batches - 1) if batches else function


def _clip_rms(elements: int) -> optax.GradientTransformation:
    # All elements after the first `elements` are zeros (padding).
    def update(updates, state, params=None):
        del params
        rms = jnp.sqrt(jnp.sum(jnp.square(updates)) / elements)
        return updates / jnp.maximum(1.0, rms), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def adafactor(vocabulary: int | None = None) -> optax.GradientTransformation:
    """Returns Adafactor (Shazeer & Stern 2018, arXiv 1804.04235) without momentum.

    The second moment is stored as row and column means for a matrix, and in full for a vector. Its decay is 1 -
    t^-0.8. Each update is scaled down to an RMS of at most 1. The RMS leaves out the padding rows of the embedding
    table, which follow its `vocabulary` rows of tokens. The paper's scaling by the parameter's own RMS is left out, so
    that the learning rate is absolute, as in all other optimizers.
    """

    def inner(elements):
        return optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=1), _clip_rms(elements))

    return each_matrix(inner, vocabulary)


# Jordan et al. 2024: a x + b x^3 + c x^5 moves singular values from (0, 1] to about 1 in five iterations.
_NEWTON_SCHULZ, _ROUNDS = (3.4445, -4.7750, 2.0315), 5


def orthogonalized(x_RC: jax.Array) -> jax.Array:
    """Orthogonalizes a matrix [rows, columns] approximately by Newton-Schulz iterations: U S V^T becomes about U V^T.
    Singular values of the result are between 0.7 and 1.2."""
    a, b, c = _NEWTON_SCHULZ
    x = x_RC.T if x_RC.shape[0] > x_RC.shape[1] else x_RC
    x = x / (jnp.linalg.norm(x) + 1e-8)

    def one(_, x):
        square = x @ x.T
        return a * x + (b * square + c * square @ square) @ x

    x = jax.lax.fori_loop(0, _ROUNDS, one, x)
    return x.T if x_RC.shape[0] > x_RC.shape[1] else x


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Returns the muon transformation: each matrix's Nesterov momentum is orthogonalized and scaled by 0.2
    sqrt(max(rows, columns)).

    The scale gives updates the RMS of AdamW updates, so that muon and AdamW can share learning rate and weight decay
    (Liu et al. 2025, arXiv 2502.16982). All parameters must be in MATRICES. Layers are computed one after the other, so
    that devices gather one layer at a time. `momentum`: decay of the velocity.
    """

    def direction(path, mean):
        shape = as_matrices(path, mean.shape)[-2:]

        def one(matrix):
            return ((0.2 * max(shape) ** 0.5 * orthogonalized(matrix.reshape(shape))).reshape(matrix.shape),)

        return by_layer(one, path, mean)[0]

    def update(updates, state, params=None):
        del params
        average = jax.tree.map(lambda kept, grad: momentum * kept + (1.0 - momentum) * grad, state.trace, updates)
        nesterov = jax.tree.map(lambda kept, grad: momentum * kept + (1.0 - momentum) * grad, average, updates)
        return jax.tree_util.tree_map_with_path(direction, nesterov), optax.TraceState(average)

    return optax.GradientTransformation(optax.trace(momentum).init, update)


def muon(momentum: float, rest: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transformation that applies muon (Jordan et al. 2024, github.com/KellerJordan/Muon) to hidden matrices
    and the transformation `rest` to all other parameters."""

    def label(path, _):
        matrix = matrix_of(path)
        return "muon" if matrix and matrix.hidden else "rest"

    return optax.partition(
        {"muon": scale_by_muon(momentum), "rest": rest}, lambda params: jax.tree_util.tree_map_with_path(label, params)
    )
