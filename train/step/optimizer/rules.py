"""The table of optimizers, with gradient clipping, learning-rate schedules and accumulation. Gradients arrive as sums
over tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from bytescope.train.step.optimizer.adam_8bit import scale_by_adam_8bit
from bytescope.train.step.optimizer.param_matrices import adafactor, muon

# The norm that is clipped: of all gradients together, or of each layer and of all other parameters together.
CLIPS = ("global", "layer")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The config keys `optimizer.*`: the optimizer, its learning rate, weight decay and gradient clipping.

    Fields:
      name: the optimizer, such as "adamw"; configs/base.py lists all.
      learning_rate: peak learning rate, reached at the end of warm-up.
      warmup_steps: number of updates of linear warm-up.
      end_fraction: final learning rate of the cosine decay, as a fraction of the peak.
      b1, b2: decay of the first and the second moment.
      momentum: decay of the velocity, for the optimizers "momentum" and "muon".
      eps: added to the root of the second moment.
      weight_decay: weight decay of matrices, multiplied by the learning rate.
      router_bias_rate: change of a router bias per update.
      clip_norm: maximum norm of the gradient, 0 for no clipping.
      fused_backward: True to update each layer inside the backward pass, so that the gradient of only one layer exists
        at a time.
      freeze: patterns of parameters that are not trained, such as "*norm*".
      clip: "global" clips the norm of all gradients together, "layer" the norm of each layer's gradients.
    """

    name: str
    learning_rate: float
    warmup_steps: int
    end_fraction: float
    b1: float
    b2: float
    momentum: float
    eps: float
    weight_decay: float
    router_bias_rate: float
    clip_norm: float
    fused_backward: bool
    freeze: tuple[str, ...]
    clip: str


class ClipState(NamedTuple):
    """The optimizer state of gradient clipping. `grad_norm`: global L2 norm of the mean gradient before clipping, a
    float32 scalar."""

    grad_norm: jax.Array


def mean_and_clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that turns gradients summed over tokens into their mean over tokens, and clips the
    global norm of the mean, in float32.

    The division is after accumulation, so that every unmasked token has the same weight. The norm is stored in the
    state for the metrics.

    The update function takes two more arguments: `tokens`, the number of unmasked tokens, and `factor`. Loss scaling
    multiplied the loss by `factor`, so gradients are divided by it.

    Args:
      max_norm: maximum norm of the mean gradient, 0 for no clipping.
    """

    def init(params):
        del params
        return ClipState(jnp.zeros((), jnp.float32))

    def update(updates, state, params=None, *, tokens, factor=1.0, **extra):
        del state, params, extra
        with jax.named_scope("grad_norm"):
            inverse = 1.0 / (jnp.maximum(tokens, 1).astype(jnp.float32) * factor)
            updates = _float32(updates)
            norm = optax.tree.norm(updates) * inverse
            scale = clip_scale(norm, inverse, max_norm)
        return jax.tree.map(lambda g: g * scale, updates), ClipState(norm)

    return optax.GradientTransformationExtraArgs(init, update)


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def in_float32(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the transformation `rule` for parameters of any dtype, computed as if they were float32.

    Its state is float32 too, unless the rule itself chooses a smaller dtype.
    """

    def init(params):
        # Initialized from zeros, because parameters may be abstract here.
        return rule.init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params))

    def update(updates, state, params=None):
        return rule.update(updates, state, None if params is None else _float32(params))

    return optax.GradientTransformation(init, update)


def clip_scale(norm: jax.Array, inverse: jax.Array, max_norm: float) -> jax.Array:
    """Returns the factor that turns a gradient summed over tokens into the clipped mean gradient.

    Args:
      norm: norm of the mean gradient.
      inverse: 1 / number of tokens, the factor from the sum to the mean.
      max_norm: maximum norm of the mean gradient, 0 for no clipping.
    """
    return inverse * jnp.minimum(1.0, max_norm / norm) if max_norm else inverse


def squares(leaves: Any) -> jax.Array:
    """Returns the float32 sum of squares of all leaves."""
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(leaves)), jnp.float32(0.0))


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns a function from the update's index to the learning rate: linear warm-up, then cosine decay until
    `steps`.

    The final rate is `end_fraction` of the peak.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, max(steps - 1, 0))
    return optax.schedules.warmup_cosine_decay_schedule(
        peak / max(warmup, 1), peak, warmup, max(steps, warmup + 1), peak * config.end_fraction
    )


def decayed(params: Any) -> Any:
    """Returns a tree of bools: True for matrices (leaves named `w_*`), which get weight decay. Biases `b_*` and norms
    do not."""
    return jax.tree_util.tree_map_with_path(lambda path, _: str(path[-1].key).startswith("w_"), params)


def _adam(config: OptimizerConfig, mu_dtype: str | None = None) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=mu_dtype)


def _adagrad(eps: float) -> optax.GradientTransformation:
    # eps is added to the root, as in PyTorch. optax adds eps to the sum itself, where 1e-8 has the effect of 1e-4.
    def update(updates, state, params=None):
        del params
        sums = jax.tree.map(lambda g, t: jnp.square(g) + t, updates, state.sum_of_squares)
        # A gradient that was always 0 has no direction, even if eps is 0.
        directions = jax.tree.map(lambda g, t: jnp.where(t > 0, g / (jnp.sqrt(t) + eps), 0.0), updates, sums)
        return directions, optax.ScaleByRssState(sums)

    return optax.GradientTransformation(optax.scale_by_rss(0.0).init, update)


# name -> the transformation from mean gradients to a direction, given the group `optimizer` and the vocabulary size.
# Weight decay and learning rate follow in the same way for every row. AdamW is Loshchilov & Hutter 2019 (arXiv
# 1711.05101), Adagrad Duchi et al. 2011, Lion Chen et al. 2023 (arXiv 2302.06675).
OPTIMIZERS: Mapping[str, Callable[[OptimizerConfig, int | None], optax.GradientTransformation]] = {
    "adamw": lambda config, _: _adam(config),
    "adamw_bf16": lambda config, _: _adam(config, "bfloat16"),
    "adamw_8bit": lambda config, _: scale_by_adam_8bit(config.b1, config.b2, config.eps),
    "adafactor": lambda _, vocabulary: adafactor(vocabulary),
    "adagrad": lambda config, _: _adagrad(config.eps),
    "rmsprop": lambda config, _: optax.scale_by_rms(config.b2, config.eps, eps_in_sqrt=False),
    "momentum": lambda config, _: optax.trace(config.momentum),
    "lion": lambda config, _: optax.scale_by_lion(config.b1, config.b2),
    "muon": lambda config, _: muon(config.momentum, _adam(config)),
}


# Optimizers that update each row of a table without reading other rows. muon leaves tables to AdamW.
ROW_BY_ROW = ("adamw", "adamw_bf16", "adagrad", "rmsprop", "momentum", "lion", "muon")


def make_rule(
    config: OptimizerConfig, schedule: optax.Schedule, vocabulary: int | None = None
) -> optax.GradientTransformation:
    """Returns the transformation from the mean, clipped gradient to the update of the parameters, in float32.

    Args:
      config: the config group `optimizer`.
      schedule: index of the update -> learning rate.
      vocabulary: number of tokens in the vocabulary; None if the embedding table has no padding rows.
    """
    return in_float32(
        optax.chain(
            OPTIMIZERS[config.name](config, vocabulary),
            optax.add_decayed_weights(config.weight_decay, decayed),
            optax.scale_by_learning_rate(schedule),
        )
    )


def make_optimizer(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    *,
    vocabulary: int | None = None,
    multisteps: int,
    accumulator: DTypeLike = jnp.float32,
) -> Any:
    """Returns the optimizer of `config`: mean over tokens, clipping, and the optimizer's rule. Its update function
    takes one more argument, `tokens`, the number of unmasked tokens of the update.

    Args:
      config: the config group `optimizer`.
      schedule: index of the update -> learning rate.
      vocabulary: number of tokens in the vocabulary; None if the embedding table has no padding rows.
      multisteps: number of micro-steps per update. Unless it is 1, the optimizer is wrapped in `optax.MultiSteps`,
        which sums the gradients of the micro-steps.
      accumulator: dtype of that sum.
    """
    chain = optax.chain(mean_and_clip(config.clip_norm), make_rule(config, schedule, vocabulary))
    if multisteps == 1:
        return chain
    return optax.MultiSteps(chain, multisteps, use_grad_mean=False, accumulator_dtype=accumulator)


def grad_norm(opt_state: Any) -> jax.Array:
    """Returns the last gradient norm before clipping, a float32 scalar, from the optimizer state."""
    inner = opt_state.inner_opt_state if isinstance(opt_state, optax.MultiStepsState) else opt_state
    return inner[0].grad_norm
