"""The loss of a program: runs the model on a batch and computes the cross-entropy of its output."""

from collections.abc import Callable, Collection
from typing import Any

import jax
from flax import nnx

from bytescope.model import ModelConfig, Precision
from bytescope.model.experts.expert_layer import Load
from bytescope.model.frozen import merge_parameters
from bytescope.model.zigzag import zigzag
from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.parallel.layout import Layout
from bytescope.train.step.losses import LOSSES, LossConfig, LossSettings, count_tokens
from bytescope.train.step.routing import auxiliary_loss


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
