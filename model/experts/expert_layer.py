"""The experts of a block: the router, the weights of the routed experts, and statistics of the routing."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.experts import expert_products
from bytescope.model.experts.expert_kernels import CAPACITY
from bytescope.model.experts.expert_products import DispatchSettings
from bytescope.model.experts.routers import Choice, choose
from bytescope.model.layers import ACTIVATIONS, MLPS, STREAM, WITHIN, gathered, move, param, read
from bytescope.model.model_config import ModelConfig
from bytescope.model.names import tag
from bytescope.model.placement import Axes, Placement
from bytescope.model.precision import Precision
from bytescope.model.remat.offload import to_device


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=[],
    data_fields=["counts", "dropped", "entropy", "balance", "router_z", "shares"],
)
@dataclasses.dataclass(frozen=True)
class Load:
    """Router statistics of one micro-batch, float32. Padding is not counted. Statistics of several layers have a
    leading layer axis.

    A choice is a pair of a token and one of its k experts.

    Fields:
      counts: [E], the number of choices of each of E experts, dropped choices included.
      dropped: the number of choices that were dropped because their expert had no free row.
      entropy: the entropy of a token's scores over the experts, in nats, mean over tokens with an unmasked target.
      balance: the load-balance loss of Switch (arXiv 2101.03961) with k choices: E times the sum over experts of
        (fraction of the choices x mean score). It is 1 if balanced, and at most E.
      router_z: the square of the logits' log-sum-exp (ST-MoE, arXiv 2202.08906), mean over tokens with an unmasked
        target: the tokens of the cross-entropy, so that micro-batches add up to their whole batch.
      shares: [E], each expert's mean score. None unless the balance loss pools all layers (`pool_balance`).
    """

    counts: jax.Array
    dropped: jax.Array
    entropy: jax.Array
    balance: jax.Array
    router_z: jax.Array
    shares: jax.Array | None = None


class Experts(nnx.Module):
    """Mixture of experts, [B, L, D] -> [B, L, D]: a router chooses K experts for each token. Each expert is an MLP, and
    the weighted outputs of a token's experts are summed.

    The table EXCHANGES lists the ways to move tokens to the devices of their experts, and the table KERNELS lists the
    kernels for the matrix products. The router's weight multiplies the input of an expert's down projection instead of
    the output, because the gradient then does not need the output.

    `pooled`: True to record the mean score of each expert in the statistics (`Load.shares`).
    """

    def __init__(
        self, config: ModelConfig, precision: Precision, place: Placement, *, pooled: bool = False, rngs: nnx.Rngs
    ):
        self.config, self.precision, self.place, self.pooled, self.regather = config, precision, place, pooled, True
        self.gated, self.activation = MLPS[config.mlp]
        E, D, F, std, dtype = config.experts, config.d_model, config.expert_width, config.init_std, precision.param
        into, back = ("experts", "expert_width", "d_expert"), ("experts", "d_expert", "expert_width")
        self.w_router = param(rngs.params(), (D, E), ("d_model", "router"), jnp.float32, std=std, always_float32=True)
        if config.router_bias:
            self.router_bias = param(None, (E,), ("router",), jnp.float32, always_float32=True)
        if self.gated:
            self.w_gate = param(rngs.params(), (E, D, F), into, dtype, std=std, contracted=True)
        self.w_up = param(rngs.params(), (E, D, F), into, dtype, std=std, contracted=True)
        self.w_down = param(
            rngs.params(), (E, F, D), back, dtype, std=std / math.sqrt(2 * config.n_layers), contracted=True
        )

    def route(self, x_BLD: jax.Array) -> tuple[jax.Array, Choice]:
        """Returns the router logits [B, L, E] float32, and the indices and weights of the experts chosen for each
        token."""
        with jax.named_scope("router"):
            logits = _logits_regathered if self.regather else _logits
            logits_BLE = logits(self.place, self.w_router.get_metadata()["axes"], x_BLD, self.w_router[...])
            logits_BLE = tag(self.place(logits_BLE, ("batch", "length", None)), "router_logits")
            bias_E = None
            if self.config.router_bias:
                bias_E = jax.lax.stop_gradient(read(self.router_bias, jnp.float32, self.place))
            return logits_BLE, choose(logits_BLE, bias_E, self.config)

    def __call__(
        self, x_BLD: jax.Array, real_BL: jax.Array | None = None, learned_BL: jax.Array | None = None
    ) -> tuple[jax.Array, Load]:
        """Returns the weighted sum of each token's experts, [B, L, D] in the compute dtype, and the router statistics.

        `real_BL`: bool, False for padding tokens, which visit no expert and get the sum 0; None if there is no
        padding. `learned_BL`: bool, True for tokens with an unmasked target; None for all tokens without padding.
        """
        x_BLD = move(self.place(x_BLD, STREAM), self.place, WITHIN, STREAM)
        logits_BLE, choice = self.route(x_BLD)
        if real_BL is not None:
            expert_BLK = jnp.where(real_BL[..., None], choice.expert_BLK, self.config.experts)
            choice = Choice(expert_BLK, choice.weight_BLK, choice.share_BLE)
        if self.config.moe_kernel == "dense":
            y_BLD, dropped = self._apply_all_experts(x_BLD, choice), jnp.zeros((), jnp.float32)
        else:
            y_BLD, dropped = self._routed(x_BLD, choice)
        y_BLD = tag(move(self.place(y_BLD, WITHIN), self.place, STREAM, WITHIN), "combined")
        return y_BLD, _load(logits_BLE, choice, dropped, real_BL, learned_BL, self.pooled)

    def _routed(self, x_BLD: jax.Array, choice: Choice) -> tuple[jax.Array, jax.Array]:
        config, place, act = self.config, self.place, ACTIVATIONS[self.activation]
        kernel = config.moe_kernel
        factor = config.capacity_factor
        if kernel == "capacity" and not factor:
            factor = CAPACITY
        how = DispatchSettings(kernel, place.exchange(kernel == "capacity"), factor, config.experts)
        with jax.named_scope("dispatch"):
            plan = expert_products.make_plan(how, place, choice.expert_BLK)
            x_X1D, weight_X1 = expert_products.dispatch(how, place, x_BLD, choice.weight_BLK, plan)
            x_X1D = tag(x_X1D, "dispatched")
        with jax.named_scope("experts"):
            matrices = (self.w_up, self.w_gate) if self.gated else (self.w_up,)
            up_XF, *gate = expert_products.enter(kernel, place, x_X1D, matrices, plan, regather=self.regather)
            up_XF = tag(up_XF, "expert_up")
            act_XF = act(tag(gate[0], "expert_gate")) * up_XF if self.gated else act(up_XF)
            act_XF = tag(expert_products.weigh(place, act_XF, weight_X1), "expert_act")
            y_X1D = expert_products.leave(kernel, place, act_XF, self.w_down, plan, regather=self.regather)
        with jax.named_scope("combine"):
            y_BLD = expert_products.combine(how, place, y_X1D, x_BLD[:, :, :0], plan)
        return y_BLD, plan.dropped.sum().astype(jnp.float32)

    def _apply_all_experts(self, x_BLD: jax.Array, choice: Choice) -> jax.Array:
        # Every expert computes every token, E/k times the work of routing tokens to their k experts.
        act, dtype = ACTIVATIONS[self.activation], x_BLD.dtype
        chosen_BLKE = jax.nn.one_hot(choice.expert_BLK, self.config.experts)
        weight_BLE = jnp.einsum("blk,blke->ble", choice.weight_BLK, chosen_BLKE)
        with jax.named_scope("experts"):
            up = jnp.einsum("bld,edf->blef", x_BLD, read(self.w_up, dtype, self.place))
            hidden = act(up)
            if self.gated:
                hidden = act(jnp.einsum("bld,edf->blef", x_BLD, read(self.w_gate, dtype, self.place))) * up
            hidden = hidden * weight_BLE[..., None].astype(dtype)
            return jnp.einsum("blef,efd->bld", hidden, read(self.w_down, dtype, self.place))


def _logits(place: Placement, axes: Axes, x_BLD: jax.Array, w_DE: jax.Array) -> jax.Array:
    # The default precision would compute float32 as TF32 on tensor cores.
    return jnp.einsum(
        "bld,de->ble",
        x_BLD.astype(jnp.float32),
        gathered(to_device(w_DE), place, axes),
        precision=jax.lax.Precision.HIGHEST,
    )


# `_logits` with a gradient that reads `x` and the parameter as stored; `regather` of `layers.enter`.
_logits_regathered = jax.custom_vjp(_logits, nondiff_argnums=(0, 1))
_logits_regathered.defvjp(
    lambda place, axes, x_BLD, w_DE: (_logits(place, axes, x_BLD, w_DE), (x_BLD, w_DE)),
    lambda place, axes, kept, d_BLE: jax.vjp(partial(_logits, place, axes), *kept)[1](d_BLE),
)


def _load(
    logits_BLE: jax.Array,
    choice: Choice,
    dropped: jax.Array,
    real_BL: jax.Array | None,
    learned_BL: jax.Array | None,
    pooled: bool,
) -> Load:
    with jax.named_scope("load"):
        E, K = logits_BLE.shape[-1], choice.expert_BLK.shape[-1]
        learned_BL = real_BL if learned_BL is None else learned_BL
        counts_E = jax.nn.one_hot(choice.expert_BLK, E, dtype=jnp.float32).sum((0, 1, 2))
        share_BLE = choice.share_BLE
        entropy_BL = -(share_BLE * jnp.log(jnp.maximum(share_BLE, jnp.finfo(jnp.float32).tiny))).sum(-1)
        share_E = _mean_over_tokens(share_BLE, real_BL)
        balance = E * (counts_E / (_count(share_BLE, real_BL) * K) * share_E).sum()
        router_z = _mean_over_tokens(jnp.square(jax.nn.logsumexp(logits_BLE, axis=-1)), learned_BL)
        entropy = jax.lax.stop_gradient(_mean_over_tokens(entropy_BL, learned_BL))
        return Load(counts_E, dropped, entropy, balance, router_z, share_E if pooled else None)


def _count(x_BL: jax.Array, mask_BL: jax.Array | None) -> jax.Array | float:
    if mask_BL is None:
        return float(x_BL.shape[0] * x_BL.shape[1])
    return jnp.maximum(mask_BL.sum(dtype=jnp.float32), 1.0)


def _mean_over_tokens(x_BL: jax.Array, mask_BL: jax.Array | None) -> jax.Array:
    """Returns the mean of an array [B, L, ...] over the tokens in the mask, all tokens if it is None."""
    if mask_BL is None:
        return x_BL.mean((0, 1))
    mask = mask_BL.reshape(*mask_BL.shape, *[1] * (x_BL.ndim - 2))
    return jnp.where(mask, x_BL, 0.0).sum((0, 1)) / _count(x_BL, mask_BL)


def choice_shares(counts_NE: jax.Array) -> jax.Array:
    """Returns the fraction (0 to 1) of a layer's choices that each expert got, [N layers, E experts]. A choice is a
    pair of a token and one of its experts. Fractions are 0 in layers without choices.

    `counts_NE`: the number of choices of each expert.
    """
    return counts_NE / jnp.maximum(counts_NE.sum(-1, keepdims=True), 1.0)


def pool_balance(load: Load | None) -> Load | None:
    """Returns the router statistics `load` with a balance loss that is pooled over all layers. If `load` is None or has
    no mean scores (`shares`), it is returned unchanged.

    The pooled loss is E sum_e f_e p_e. f_e is expert e's fraction of the choices (pairs of a token and one of its k
    experts) and p_e its mean score, both averaged over the layers. `load_balancing_loss_func` of transformers returns k
    times this value.
    """
    if load is None or load.shares is None:
        return load
    layers, E = load.counts.shape
    balance = E * (choice_shares(load.counts).mean(0) * load.shares.mean(0)).sum()
    return dataclasses.replace(load, balance=jnp.broadcast_to(balance, (layers,)), shares=None)
