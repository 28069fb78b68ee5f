"""The loss of a program: cross-entropy over the vocabulary, and `make_loss`, which runs the model on a batch first.

Each way to compute the cross-entropy is a row of LOSSES and returns the sum over unmasked targets:

    loss(x_BLD, w_head, targets_BL, settings) -> float32 sum of negative log-likelihoods in nats

Targets equal to IGNORE have no loss. The head is passed as stored, [D, V], or [V, D] if it is the token table. Its
gradient is accumulated and returned in the parameter dtype. Nothing is transposed outside of matrix products: XLA
would compute the transposed table before a loop over micro-batches and keep it in memory during all of them.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from bytescope.model import ModelConfig, Precision
from bytescope.model.experts.expert_layer import Load
from bytescope.model.frozen import merge_parameters
from bytescope.model.layers import soft_cap
from bytescope.model.zigzag import zigzag
from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.parallel.layout import Layout
from bytescope.train.step.routing import auxiliary_loss

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The config keys `loss.*`: how the cross-entropy is computed, and the auxiliary losses of experts.

    Fields:
      kind: "full", or "chunked", which never stores the whole logits array.
      balance: coefficient of the experts' load-balance loss.
      balance_layers: "separate" for the mean of one load-balance loss per layer, "pooled" for one loss from the expert
        loads (tokens per expert) and router scores, averaged over layers.
      router_z: coefficient of the router z-loss.
      chunk: tokens per chunk of the chunked loss, on each data-parallel rank.
    """

    kind: str
    balance: float
    balance_layers: str
    router_z: float
    chunk: int


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The settings of a loss.

    Fields:
      layout: the sharding of the arrays.
      compute: dtype of the matrix products.
      positions: number of positions per sequence for which logits exist at the same time.
      vocabulary: number of columns of the head that are tokens, None for all. Other columns are padding and get
        probability 0.
      logits: dtype in which logits are stored. Sums over them are float32.
      tied: True if the head is the token table.
      frozen: True if the head gets no gradient.
      cap: maximum absolute value of the logits (`model.layers.soft_cap`), 0 for no maximum.
    """

    layout: Layout
    compute: DTypeLike
    positions: int
    vocabulary: int | None = None
    logits: DTypeLike = jnp.float32
    tied: bool = False
    frozen: bool = False
    cap: float = 0.0

    @property
    def head(self) -> str:
        """The axes of the head as letters of an einsum, v for the vocabulary and d for the model width: "vd" if the
        head is the token table, else "dv"."""
        return "vd" if self.tied else "dv"

    def along(self, d: T, v: T) -> tuple[T, T]:
        """Returns the two values in the order of the axes of the head `w_head`: (v, d) if the head is the token table
        [V, D], else (d, v) for a head [D, V].

        `d`: value for the axis of the model width D. `v`: value for the axis of the vocabulary V.
        """
        return (v, d) if self.tied else (d, v)


def count_tokens(targets_BL: jax.Array) -> jax.Array:
    """Returns the number of targets that are not masked (not equal to IGNORE), an int32 scalar. `targets_BL`: B
    sequences with L targets."""
    return (targets_BL != IGNORE).sum(dtype=jnp.int32)


def _without_padding(logits_V: jax.Array, settings: LossSettings) -> jax.Array:
    if settings.vocabulary in (None, logits_V.shape[-1]):
        return logits_V
    column_V = jax.lax.broadcasted_iota(jnp.int32, (1,) * (logits_V.ndim - 1) + logits_V.shape[-1:], logits_V.ndim - 1)
    return jnp.where(column_V < settings.vocabulary, logits_V, jnp.finfo(logits_V.dtype).min)


def _nll(logits_V: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (negative log-likelihood, log of the softmax denominator) of each position, both float32 [...].
    `logits_V`: [..., vocabulary]. The negative log-likelihood of masked targets is 0."""
    logits_V = logits_V.astype(jnp.float32)
    lse = jax.nn.logsumexp(logits_V, axis=-1)
    chosen = jnp.take_along_axis(logits_V, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(targets != IGNORE, lse - chosen, 0.0), lse


def _read_head(w_head: jax.Array, settings: LossSettings) -> jax.Array:
    # Cast before it is gathered over the devices that share it only in storage.
    return settings.layout.weight(w_head.astype(settings.compute), settings.along("d_model", "vocab"))


def _reduced_first(dx_BLD: jax.Array, dw: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The backward pass of the blocks waits until the head's gradient is reduced. Without the barrier the scheduler
    # keeps its operands, or the unreduced gradient D x V, on every device until the optimizer runs.
    return jax.lax.optimization_barrier((dx_BLD, dw))


def _all_logits(x_BLD: jax.Array, narrow: jax.Array, settings: LossSettings) -> jax.Array:
    logits_BLV = jnp.einsum(f"bld,{settings.head}->blv", x_BLD, narrow, preferred_element_type=settings.logits)
    logits_BLV = settings.layout(logits_BLV, ("batch", "length", "vocab"))
    return _without_padding(soft_cap(logits_BLV, settings.cap), settings)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def full(x_BLD: jax.Array, w_head: jax.Array, targets_BL: jax.Array, settings: LossSettings) -> jax.Array:
    """Returns the sum of negative log-likelihoods in nats, computed from all logits at once.

    For B sequences, L tokens per sequence and a vocabulary V, the logits take 4 x B x L x V bytes in float32. The
    backward pass also needs their gradient in the compute dtype. With autodiff the gradients of the logits and of the
    head would have the dtype of the logits, and devices would sum the gradient of the head in that dtype.

    Args:
      x_BLD: output of the last block and final norm.
      w_head: the head, or the token table if it is tied.
      targets_BL: the tokens to predict, or IGNORE.
      settings: dtypes, shardings and the like.
    """
    return _nll(_all_logits(x_BLD, _read_head(w_head, settings), settings), targets_BL)[0].sum()


def _full_forward(x_BLD, w_head, targets_BL, settings):
    narrow = _read_head(w_head, settings)
    logits_BLV = _all_logits(x_BLD, narrow, settings)
    nll_BL, lse_BL = _nll(logits_BLV, targets_BL)
    stored_like = jnp.zeros((0,), w_head.dtype)
    return nll_BL.sum(), (x_BLD, narrow, stored_like, targets_BL, logits_BLV, lse_BL)


def _full_backward(settings, residuals, d_total):
    x_BLD, narrow, stored_like, targets_BL, logits_BLV, lse_BL = residuals
    d_logits_BLV = _backprop_through_nll(logits_BLV, lse_BL, targets_BL, settings, d_total)
    # Computed once, for both products.
    d_logits_BLV = jax.lax.optimization_barrier(settings.layout(d_logits_BLV, ("batch", "length", "vocab")))
    dx_BLD = jnp.einsum(f"blv,{settings.head}->bld", d_logits_BLV, narrow)
    if settings.frozen:
        return dx_BLD, None, None
    dtype = settings.layout.reduce or settings.compute
    dw = jnp.einsum(f"bld,blv->{settings.head}", x_BLD, d_logits_BLV, preferred_element_type=dtype)
    dw = settings.layout.gradient(dw, settings.along("d_model", "vocab")).astype(stored_like.dtype)
    return *_reduced_first(dx_BLD, dw), None


full.defvjp(_full_forward, _full_backward)


def _backprop_through_nll(
    logits_V: jax.Array,
    lse: jax.Array,
    targets: jax.Array,
    settings: LossSettings,
    d_nll: jax.Array | float = 1.0,
) -> jax.Array:
    """Returns the gradient of the logits before the cap, [..., V] in the compute dtype, computed in float32.

    Args:
      logits_V: the capped logits of V tokens, [..., V].
      lse: log of the softmax denominator of each position, float32 [...].
      targets: the tokens to predict, or IGNORE, [...].
      settings: the cap and the dtypes.
      d_nll: float32 gradient of the sum of negative log-likelihoods.
    """
    logits_V = logits_V.astype(jnp.float32)
    vocabulary_V = jax.lax.broadcasted_iota(jnp.int32, logits_V.shape, logits_V.ndim - 1)
    d_logits_V = jnp.exp(logits_V - lse[..., None]) - (vocabulary_V == targets[..., None])
    if settings.cap:
        # Padding logits are very large negative numbers: without the clamp their square would overflow.
        d_logits_V *= 1.0 - jnp.square(jnp.maximum(logits_V / settings.cap, -1.0))
    return jnp.where((targets != IGNORE)[..., None], d_nll * d_logits_V, 0.0).astype(settings.compute)


def _split_into_chunks(x: jax.Array, settings: LossSettings, fill=0) -> jax.Array:
    """Reshapes [B, L, ...], B sequences of L tokens, to [n, R, B/R, positions, ...]: n chunks of `settings.positions`
    positions, on each of R ranks that have different tokens. The last chunk is filled up with `fill`."""
    ranks, context, positions = settings.layout.ranks, settings.layout.context, settings.positions
    x = x.reshape(ranks, x.shape[0] // ranks, context, -1, *x.shape[2:])
    if pad := -x.shape[3] % positions:
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, pad)] + [(0, 0)] * (x.ndim - 4), constant_values=fill)
    x = x.reshape(*x.shape[:3], -1, positions, *x.shape[4:])
    x = jnp.moveaxis(x, (3, 2), (0, 2))
    return x.reshape(x.shape[0], ranks * context, *x.shape[3:])


def _join_chunks(x: jax.Array, like: jax.Array, settings: LossSettings) -> jax.Array:
    """Inverts `_split_into_chunks` and removes its padding: [n, R, B/R, positions, ...] -> the shape of `like`."""
    ranks, context = settings.layout.ranks, settings.layout.context
    x = x.reshape(x.shape[0], ranks, context, *x.shape[2:])
    x = jnp.moveaxis(x, (0, 2), (3, 2))
    x = x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, : like.shape[1] // context]
    return x.reshape(like.shape)


def _chunk_logits(x_RBCD: jax.Array, w_head: jax.Array, settings: LossSettings) -> jax.Array:
    x_RBCD = settings.layout(x_RBCD, ("rank", None, None, None))
    logits_RBCV = jnp.einsum(f"rbcd,{settings.head}->rbcv", x_RBCD, w_head, preferred_element_type=settings.logits)
    return _without_padding(soft_cap(logits_RBCV, settings.cap), settings)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def chunked(x_BLD: jax.Array, w_head: jax.Array, targets_BL: jax.Array, settings: LossSettings) -> jax.Array:
    """Returns the sum of negative log-likelihoods in nats, computed from the logits of one chunk of positions at a
    time.

    When it is differentiated, each chunk's gradients are computed together with its loss, so that logits are not
    recomputed (as in fused linear cross-entropy, Hsu et al. 2024, arXiv 2410.10989). Sums are float32.

    Args:
      x_BLD: output of the last block and final norm, [sequences, tokens, width].
      w_head: the head, or the token table if it is tied.
      targets_BL: the tokens to predict, or IGNORE.
      settings: the chunk size, dtypes, shardings and the like.
    """
    narrow = _read_head(w_head, settings)

    def chunk(total, xs):
        x_RBCD, targets_RBC = xs
        return total + _nll(_chunk_logits(x_RBCD, narrow, settings), targets_RBC)[0].sum(), None

    xs = (_split_into_chunks(x_BLD, settings), _split_into_chunks(targets_BL, settings, IGNORE))
    return jax.lax.scan(chunk, jnp.zeros((), jnp.float32), xs)[0]


def _chunked_forward(x_BLD, w_head, targets_BL, settings):
    layout = settings.layout
    narrow = _read_head(w_head, settings)
    sums = ("rank", *settings.along(None, "vocab"))

    def chunk(carry, xs):
        total, dw = carry
        x_RBCD, targets_RBC = xs
        logits_RBCV = _chunk_logits(x_RBCD, narrow, settings)
        nll_RBC, lse_RBC = _nll(logits_RBCV, targets_RBC)
        d_logits_RBCV = _backprop_through_nll(logits_RBCV, lse_RBC, targets_RBC, settings)
        dx_RBCD = jnp.einsum(f"rbcv,{settings.head}->rbcd", d_logits_RBCV, narrow)
        if settings.frozen:
            return (total + nll_RBC.sum(), None), dx_RBCD
        # One accumulator per rank: a sum over ranks inside the loop would be a collective in every chunk.
        dw = dw + jnp.einsum(f"rbcv,rbcd->r{settings.head}", d_logits_RBCV, x_RBCD, preferred_element_type=jnp.float32)
        return (total + nll_RBC.sum(), layout(dw, sums)), dx_RBCD

    start = jnp.zeros((), jnp.float32), None
    if not settings.frozen:
        start = start[0], layout(jnp.zeros((layout.token_ranks, *w_head.shape), jnp.float32), sums)
    xs = (_split_into_chunks(x_BLD, settings), _split_into_chunks(targets_BL, settings, IGNORE))
    (total, dw), dx = jax.lax.scan(chunk, start, xs)
    dx_BLD = _join_chunks(dx, x_BLD, settings)
    if settings.frozen:
        return total, (dx_BLD, None)
    # Summed in the dtype in which devices sum gradients; jnp.sum would use a larger dtype.
    dw = layout.reduced(dw)
    dw = jax.lax.reduce(dw, jnp.zeros((), dw.dtype), jax.lax.add, (0,))
    dw = layout.gradient(dw, settings.along("d_model", "vocab")).astype(w_head.dtype)
    return total, _reduced_first(dx_BLD, dw)


def _chunked_backward(settings, residuals, d_total):
    del settings
    dx_BLD, dw = residuals
    return (dx_BLD * d_total).astype(dx_BLD.dtype), None if dw is None else (dw * d_total).astype(dw.dtype), None


chunked.defvjp(_chunked_forward, _chunked_backward)

LOSSES: Mapping[str, Callable[..., jax.Array]] = {"full": full, "chunked": chunked}


def make_cross_entropy(
    config: LossConfig,
    model: ModelConfig,
    seq_len: int,
    layout: Layout,
    precision: Precision,
    micro: int,
    frozen: Collection[str] = (),
) -> Callable[..., jax.Array]:
    """Returns the function cross_entropy(x [B, L, D], w_head, targets [B, L]) -> float32 sum in nats over unmasked
    targets, with B sequences, L tokens per sequence and width D.

    Args:
      config: how the loss is computed.
      model: config of the model.
      seq_len: tokens per sequence.
      layout: the shardings over the mesh.
      precision: the dtypes.
      micro: sequences of a micro-batch on each data-parallel rank. A chunk of `config.chunk` tokens is divided equally
        among them.
      frozen: dotted paths of the parameters that are not trained. A frozen head gets no gradient.
    """
    positions = min(max(config.chunk // micro, 1), seq_len // layout.context)
    settings = LossSettings(
        layout,
        precision.compute,
        positions,
        model.vocab_size,
        precision.logits,
        model.tie_embeddings,
        ("w_token" if model.tie_embeddings else "w_head") in frozen,
        model.logits_softcap,
    )
    return lambda x_BLD, w_head, targets_BL: LOSSES[config.kind](x_BLD, w_head, targets_BL, settings)


def in_ring_order(batch: dict[str, jax.Array], layout: Layout) -> tuple[jax.Array, ...]:
    """Returns the inputs and targets of a batch in the order in which devices store tokens. With ring attention that is
    the order of `model.zigzag`, in which a device has an early and a late chunk of the sequence. Otherwise the order
    does not change."""
    both = batch["inputs"], batch["targets"]
    return tuple(zigzag(x_BL, layout.ring.size) for x_BL in both) if layout.ring else both


def token_masks(batch: dict[str, jax.Array], *, experts: bool, layout: Layout) -> tuple[jax.Array | None, ...]:
    """Returns two bool masks [..., B, L] of B sequences with L tokens, in the order in which devices store the tokens:
    False for padding, and False for tokens whose target is masked.

    The first mask is None if rows have no padding. Both are None for models without experts, because only experts need
    them.
    """
    if not experts:
        return None, None
    marks, learned = batch.get("segments", batch.get("mask")), batch["targets"] != IGNORE
    real = None if marks is None else marks != 0
    if layout.ring:
        size = layout.ring.size
        real, learned = jax.tree.map(lambda mask: zigzag(mask, size), (real, learned))
    return real, learned


def make_loss(
    config: LossConfig,
    model: ModelConfig,
    seq_len: int,
    graph: nnx.GraphDef,
    layout: Layout,
    precision: Precision,
    micro: int,
    frozen: Collection[str] = (),
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, Load | None]]]:
    """Returns the function loss(params, batch, dropout_key_B, frozen=None) -> (total, (cross_entropy, load)).

    `cross_entropy` is a float32 sum over unmasked targets in nats. `total`, which is differentiated, also includes the
    auxiliary losses of experts. `load` has the router statistics of the micro-batch, such as the number of tokens of
    each expert; it is None without experts.

    The returned function takes `batch`, the int32 arrays [B, L] of B sequences with L tokens, by name; `dropout_key_B`,
    None for no dropout; and `frozen`, the values of parameters that are not in `params`.

    Args:
      config: how the cross-entropy is computed, and the coefficients of the auxiliary losses.
      model: config of the model.
      seq_len: tokens per sequence.
      graph: the graph definition of the Transformer.
      layout: the shardings over the mesh.
      precision: the dtypes.
      micro: sequences of a micro-batch on each data-parallel rank.
      frozen: dotted paths of the parameters that are not trained. A frozen head gets no gradient.
    """
    cross_entropy = make_cross_entropy(config, model, seq_len, layout, precision, micro, frozen)

    def loss(
        params: Any, batch: dict[str, jax.Array], dropout_key_B: jax.Array | None, frozen: Any = None
    ) -> tuple[jax.Array, tuple[jax.Array, Load | None]]:
        transformer = nnx.merge(graph, merge_parameters(params, frozen))
        inputs_BL, targets_BL = in_ring_order(batch, layout)
        x_BLD, load = transformer.hidden_and_load(
            inputs_BL,
            dropout_key_B,
            batch.get("segments"),
            *token_masks(batch, experts=model.experts > 0, layout=layout),
        )
        with jax.named_scope("loss"):
            total = cross_entropy(x_BLD, transformer.head(), targets_BL)
            if load is None:
                return total, (total, None)
            auxiliary = auxiliary_loss(load, count_tokens(targets_BL), config.balance, config.router_z)
            return total + auxiliary, (total, load)

    return loss
