"""Rematerialization: what blocks keep for their backward pass. One row per policy; ranges of layers may have their own.

A policy wraps pieces of a block in `jax.checkpoint` and says which named tensors (model/names.py) are kept.
Under `lax.scan` the loop already keeps XLA from merging recomputed values with the originals, so
`prevent_cse=False` is right and cheaper there; unrolled layers need `prevent_cse=True`, or
common-subexpression elimination undoes the recomputation altogether.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import jax
from jax import checkpoint_policies as cp

from bytescope.model.names import NAMES

# What adapters make besides (model/adapters.py): their products, r wide, and their dropout masks.
ADAPTERS = tuple(f"lora_{target}" for target in ("q", "k", "v", "o", "gate", "up", "down"))
ADAPTER_MASKS = ("attn_norm_mask", "context_mask", "mlp_norm_mask", "act_mask")
# What experts make (model/experts/expert_layer.py).
EXPERTS = ("router_logits", "dispatched", "expert_gate", "expert_up", "expert_act", "combined")
# What latent attention makes besides (model/attention/latent.py).
LATENTS = ("q_latent", "kv_latent", "k_rope")
# Everything a block makes outside the attention core that its backward pass reads: with it saved, only the
# core is recomputed. 34 sbh bytes for GPT shapes (Korthikanti et al. 2022, arXiv 2205.05198); `lse` is what
# a flash kernel's own gradient needs, so that it is not run again. `q`, `k`, `attn_out` and
# `mlp_out` are read by norms alone that only some models have.
OUTSIDE_CORE = (
    "attn_norm",
    "q",
    "k",
    "q_rot",
    "k_rot",
    "v",
    "context",
    "lse",
    "attn_out",
    "attn_out_mask",
    "mid",
    "mlp_norm",
    "gate",
    "up",
    "act",
    "mlp_out",
    "mlp_out_mask",
    *LATENTS,
    *EXPERTS,
    *ADAPTERS,
    *ADAPTER_MASKS,
)
# The core's tensors too: softmax, dropout mask and result, 5 a s^2 b bytes. Only element-wise work is recomputed. Under
# a flash kernel, which makes none of the three, the same as OUTSIDE_CORE.
MEGATRON = (*OUTSIDE_CORE, "probs", "probs_mask", "probs_dropped")
# What products in fp8 read instead of the wide tensors, which no gradient reads then.
QUANTIZED = tuple(f"{name}_{part}" for name in ("attn_norm", "context", "mlp_norm", "act") for part in ("fp8", "scale"))
# Matmul outputs and the attention context: norms, rotations, activations and the scores are recomputed.
MATMULS = (
    "q",
    "k",
    "v",
    *LATENTS,
    "context",
    "lse",
    "attn_out",
    "gate",
    "up",
    "router_logits",
    "expert_gate",
    "expert_up",
    *ADAPTERS,
)


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """One row of the table.

    saveable: a `jax.checkpoint` policy, None for no checkpoint at all. names: the checkpoint names that it keeps.
    nested: groups of layers are checkpointed around the layers. offloads: something moves to host memory; of `names`
    those in `moved`.
    """

    summary: str
    saveable: Callable[..., object] | None
    names: tuple[str, ...] = ()
    nested: bool = False
    offloads: bool = False
    moved: tuple[str, ...] = ()

    def wrap(self, piece: Callable, *, scanned: bool) -> Callable:
        """`piece`, which then keeps what this policy says. `scanned`: whether it runs inside `lax.scan`."""
        if self.saveable is None:
            return piece
        # Not policy=None: inside jax.checkpoint that means full recomputation.
        return jax.checkpoint(piece, policy=self.saveable, prevent_cse=not scanned)  # type: ignore[arg-type]  # offload policies return more than bools


def keep(summary: str, save: Sequence[str] = (), offload: Sequence[str] = ()) -> CheckpointPolicy:
    """Returns the policy that keeps the names `save` on the device and the names `offload` in pinned host memory,
    and recomputes the rest.
    """
    if offload:
        saveable = cp.save_and_offload_only_these_names(
            names_which_can_be_saved=list(save),
            names_which_can_be_offloaded=list(offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        saveable = cp.save_only_these_names(*save) if save else cp.nothing_saveable
    return CheckpointPolicy(summary, saveable, (*save, *offload), offloads=bool(offload), moved=tuple(offload))


POLICIES: Mapping[str, CheckpointPolicy | None] = {
    "none": CheckpointPolicy("every residual kept, nothing recomputed", None),
    "full": keep("only the input of each block kept, the block recomputed"),
    "selective": keep("everything outside the attention core kept, the core recomputed", (*OUTSIDE_CORE, *QUANTIZED)),
    "megatron": keep(
        "what Megatron keeps, 34 sbh + 5 as^2b: only element-wise work recomputed", (*MEGATRON, *QUANTIZED)
    ),
    "minimal": keep("matmul outputs and attention context kept, norms and activations recomputed", MATMULS),
    "dots": CheckpointPolicy("outputs of all matrix products kept", cp.dots_saveable),
    "dots_no_batch": CheckpointPolicy(
        "outputs of matrix products with weights kept, the attention core recomputed",
        cp.dots_with_no_batch_dims_saveable,
    ),
    "sqrt": CheckpointPolicy(
        "inputs of groups of about sqrt(N) blocks kept, each group and block recomputed",
        cp.nothing_saveable,
        nested=True,
    ),
    "offload": keep("inputs of blocks in pinned host memory, the block recomputed", offload=("block_in",)),
    "offload_dots": CheckpointPolicy(
        "outputs of matrix products with weights in pinned host memory, the rest recomputed",
        cp.offload_dot_with_no_batch_dims("device", "pinned_host"),
        offloads=True,
    ),
    "custom": None,  # from remat.save and remat.offload
}

# Results of a block's products with its weights. For products in fp8 a policy goes by these names: the product itself
# is hidden in a kernel, or has twice the bytes of the result.
PRODUCTS = ("q", "k", "v", *LATENTS, "attn_out", "gate", "up", "mlp_out")


def _core_products(primitive: object, *inputs: object, **params: object) -> bool:
    """A policy: products with batch dimensions, which are the attention core's."""
    return bool(
        cp.dots_saveable(primitive, *inputs, **params)
        and not cp.dots_with_no_batch_dims_saveable(primitive, *inputs, **params)
    )


def _saving(name: str, saveable: Callable[..., object] | None) -> CheckpointPolicy:
    """Returns the row of POLICIES with another `jax.checkpoint` policy."""
    row = POLICIES[name]
    if row is None:
        raise ValueError(f"{name} has no row of its own")
    return dataclasses.replace(row, saveable=saveable)


# Rows of POLICIES where products are in fp8.
IN_FP8: Mapping[str, CheckpointPolicy] = {
    name: _saving(name, saveable)
    for name, saveable in (
        ("dots", cp.save_from_both_policies(cp.save_only_these_names(*PRODUCTS), _core_products)),
        ("dots_no_batch", cp.save_only_these_names(*PRODUCTS)),
        ("offload_dots", keep("", offload=PRODUCTS).saveable),
    )
}

# Likewise in models with experts, whose products are kernels, or have an axis of experts: they go by these names.
EXPERT_PRODUCTS = ("expert_gate", "expert_up")
_EXPERT_PRODUCTS = cp.save_only_these_names(*EXPERT_PRODUCTS)
WITH_EXPERTS: Mapping[str, CheckpointPolicy] = {
    name: _saving(name, saveable)
    for name, saveable in (
        ("dots", cp.save_from_both_policies(cp.dots_saveable, _EXPERT_PRODUCTS)),
        ("dots_no_batch", cp.save_from_both_policies(cp.dots_with_no_batch_dims_saveable, _EXPERT_PRODUCTS)),
        ("offload_dots", keep("", offload=(*PRODUCTS, "router_logits", *EXPERT_PRODUCTS)).saveable),
    )
}

# A policy that is resolved before a model is built, by a caller who knows the devices: no plan contains it.
AUTO = "auto"

GRANULARITIES = ("block", "parts")

# After a name in a range of layers: it is kept in host memory.
ON_HOST = "@host"


@dataclasses.dataclass(frozen=True)
class Segment:
    """Layers [start, stop) under one policy."""

    start: int
    stop: int
    policy: CheckpointPolicy
    name: str

    @property
    def groups(self) -> int:
        """Groups of a nested policy: the divisor of the number of layers nearest to its square root; else 1."""
        count = self.stop - self.start
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        return min(divisors, key=lambda d: abs(d - math.sqrt(count))) if self.policy.nested else 1


@dataclasses.dataclass(frozen=True)
class LayerPolicies:
    """`config.remat` resolved: a policy for every layer.

    Args:
      policy: a row of POLICIES; `save` and `offload` are the names of `custom`.
      layers: ranges with a policy of their own, "0-8:none", or with the names that they keep,
        "0-8:q_rot+v+block_in@host"; `policy` is for all other layers.
      granularity: whether a block is one checkpoint, or attention and MLP one each.
      fp8: whether the products of the blocks are in fp8. experts: whether there are any.

    Raises:
      ValueError: an unknown policy, name or range, with the valid ones.
    """

    policy: str = "none"
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    granularity: str = "block"
    fp8: bool = False
    experts: bool = False

    def __post_init__(self):
        for key, names in (("save", self.save), ("offload", self.offload)):
            for name in names:
                if name not in NAMES:
                    raise ValueError(f"remat.{key} names {name!r}: choose from {', '.join(NAMES)}")
        both = set(self.save) & set(self.offload)
        if both:
            raise ValueError(f"remat.save and remat.offload both name {min(both)!r}: choose one")
        used = [self.policy, *(self._range(text)[2] for text in self.layers)]
        if bool(self.save or self.offload) != ("custom" in used):
            raise ValueError(
                "remat.save and remat.offload belong to remat.policy=custom: give the policy and at "
                "least one name, or neither"
            )
        for name in used:
            self._check(name)
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"remat.granularity={self.granularity!r}: choose one of {', '.join(GRANULARITIES)}")

    @property
    def asked(self) -> set[str]:
        """Checkpoint names that the config gives itself, without the names of rows of POLICIES."""
        asked = {*self.save, *self.offload}
        for text in self.layers:
            name = self._range(text)[2]
            if name not in POLICIES:
                asked.update(self.row(name).names)
        return asked

    def _check(self, name: str) -> None:
        """Raises ValueError for what is neither a policy nor checkpoint names."""
        if name in POLICIES:
            return
        words = [word.removesuffix(ON_HOST) for word in name.split("+")]
        if len(words) == 1 and words[0] not in NAMES:
            raise ValueError(f"remat.policy={name!r}: choose one of {', '.join((*POLICIES, AUTO))}")
        for word in words:
            if word not in NAMES:
                raise ValueError(f"remat.layers names {word!r}: choose from {', '.join(NAMES)}")
        if len(set(words)) < len(words):
            raise ValueError(f"remat.layers names {name!r}: give each checkpoint name once")

    def _range(self, text: str) -> tuple[int, int, str]:
        match = re.fullmatch(r"(\d+)-(\d+):([\w+@]+)", str(text))
        if not match or int(match[1]) >= int(match[2]):
            raise ValueError(f"remat.layers={text!r}: write FIRST-END:POLICY, such as 0-8:none for the first 8")
        return int(match[1]), int(match[2]), match[3]

    def row(self, name: str) -> CheckpointPolicy:
        """The policy of this name: a row of POLICIES, `custom` with the plan's own names, or names joined by `+`."""
        known = {**POLICIES, **(WITH_EXPERTS if self.experts else {}), **(IN_FP8 if self.fp8 else {})}
        if name in known:
            return known[name] or keep("as remat.save and remat.offload say", self.save, self.offload)
        words = name.split("+")
        return keep(
            "as its range of layers says",
            [word for word in words if not word.endswith(ON_HOST)],
            [word.removesuffix(ON_HOST) for word in words if word.endswith(ON_HOST)],
        )

    def segments(self, n_layers: int) -> tuple[Segment, ...]:
        """Consecutive ranges that cover all layers, in order.

        Raises:
          ValueError: ranges that overlap or extend past the last layer.
        """
        out: list[Segment] = []
        at = 0
        for start, stop, name in sorted(self._range(text) for text in self.layers):
            if start < at or stop > n_layers:
                raise ValueError(
                    f"remat.layers={start}-{stop}:{name} overlaps another range or extends past the {n_layers} layers"
                )
            if start > at:
                out.append(Segment(at, start, self.row(self.policy), self.policy))
            out.append(Segment(start, stop, self.row(name), name))
            at = stop
        if at < n_layers:
            out.append(Segment(at, n_layers, self.row(self.policy), self.policy))
        return tuple(out)
