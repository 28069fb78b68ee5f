"""Rematerialization policies: the tensors that blocks save for their backward pass. Ranges of layers may have other
policies.

A policy wraps pieces of a block in `jax.checkpoint` and says which named tensors (model/names.py) are saved. Under
`lax.scan` the loop already prevents XLA from merging recomputed values with the originals, so `prevent_cse=False` is
correct and cheaper there. Unrolled layers need `prevent_cse=True`, because otherwise common-subexpression elimination
undoes the recomputation.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import jax
from jax import checkpoint_policies as cp

from bytescope.model.names import NAMES

# Tensors of adapters (model/adapters.py): the products with A, of width r, and the dropout masks.
ADAPTERS = tuple(f"lora_{target}" for target in ("q", "k", "v", "o", "gate", "up", "down"))
ADAPTER_MASKS = ("attn_norm_mask", "context_mask", "mlp_norm_mask", "act_mask")
# Tensors of experts (model/experts/expert_layer.py).
EXPERTS = ("router_logits", "dispatched", "expert_gate", "expert_up", "expert_act", "combined")
# Tensors that only latent attention computes (model/attention/latent.py).
LATENTS = ("q_latent", "kv_latent", "k_rope")
# Every tensor outside the attention kernel that the backward pass of a block reads: if they are saved, only the kernel
# is recomputed. 34 sbh bytes for GPT shapes (Korthikanti et al. 2022, arXiv 2205.05198). A flash kernel's gradient
# needs `lse`, so saving it avoids running the kernel again. `q`, `k`, `attn_out` and `mlp_out` are only read by norms
# that some models have.
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
# Also the kernel's tensors: softmax, dropout mask and result, 5 a s^2 b bytes. Only element-wise work is recomputed. A
# flash kernel computes none of the three; with it this policy equals OUTSIDE_CORE.
MEGATRON = (*OUTSIDE_CORE, "probs", "probs_mask", "probs_dropped")
# The quantized tensors that fp8 products read. No gradient then reads the unquantized tensors.
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
    """A remat policy: the tensors of a layer that are saved for the backward pass. The others are recomputed.

    Fields:
      summary: a one-line description.
      saveable: a `jax.checkpoint` policy, None for no checkpoint.
      names: the checkpoint names that the policy saves.
      nested: True if groups of layers are in a checkpoint too.
      offloads: True if some residuals move to host memory.
      moved: the names among `names` that move to host memory.
    """

    summary: str
    saveable: Callable[..., object] | None
    names: tuple[str, ...] = ()
    nested: bool = False
    offloads: bool = False
    moved: tuple[str, ...] = ()

    def wrap(self, piece: Callable, *, scanned: bool) -> Callable:
        """Returns the function `piece`, a layer or a part of it, in a checkpoint with this policy; unchanged if the
        policy has no checkpoint. `scanned`: True if the function runs inside `lax.scan`."""
        if self.saveable is None:
            return piece
        # Not policy=None: inside jax.checkpoint that means full recomputation.
        return jax.checkpoint(piece, policy=self.saveable, prevent_cse=not scanned)  # type: ignore[arg-type]  # offload policies return more than bools


def keep(summary: str, save: Sequence[str] = (), offload: Sequence[str] = ()) -> CheckpointPolicy:
    """Returns a policy that saves the tensors with the checkpoint names `save` on the device and the names `offload` in
    pinned host memory. All other tensors are recomputed. `summary`: its one-line description."""
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
    "none": CheckpointPolicy("every residual saved, nothing recomputed", None),
    "full": keep("only the input of each block saved, the block recomputed"),
    "selective": keep("everything outside the attention core saved, the core recomputed", (*OUTSIDE_CORE, *QUANTIZED)),
    "megatron": keep(
        "the tensors that Megatron saves, 34 sbh + 5 as^2b: only element-wise work recomputed", (*MEGATRON, *QUANTIZED)
    ),
    "minimal": keep("matmul outputs and attention context saved, norms and activations recomputed", MATMULS),
    "dots": CheckpointPolicy("outputs of all matrix products saved", cp.dots_saveable),
    "dots_no_batch": CheckpointPolicy(
        "outputs of matrix products with weights saved, the attention core recomputed",
        cp.dots_with_no_batch_dims_saveable,
    ),
    "sqrt": CheckpointPolicy(
        "inputs of groups of about sqrt(N) blocks saved, each group and block recomputed",
        cp.nothing_saveable,
        nested=True,
    ),
    "offload": keep("inputs of blocks saved in pinned host memory, the blocks recomputed", offload=("block_in",)),
    "offload_dots": CheckpointPolicy(
        "outputs of matrix products with weights saved in pinned host memory, the rest recomputed",
        cp.offload_dot_with_no_batch_dims("device", "pinned_host"),
        offloads=True,
    ),
    "custom": None,  # built from remat.save and remat.offload
}

# Results of a block's weight matmuls. For fp8 products a policy uses these names, because the product itself is hidden
# in a kernel or has twice the bytes of the result.
PRODUCTS = ("q", "k", "v", *LATENTS, "attn_out", "gate", "up", "mlp_out")


def _is_attention_product(primitive: object, *inputs: object, **params: object) -> bool:
    # A `jax.checkpoint` policy. Only attention scores and context are matrix products with batch dimensions.
    return bool(
        cp.dots_saveable(primitive, *inputs, **params)
        and not cp.dots_with_no_batch_dims_saveable(primitive, *inputs, **params)
    )


def _policy_saving(name: str, saveable: Callable[..., object] | None) -> CheckpointPolicy:
    row = POLICIES[name]
    assert row is not None  # `custom` is not replaced
    return dataclasses.replace(row, saveable=saveable)


# Rows of POLICIES that are replaced if weight matmuls are in fp8.
IN_FP8: Mapping[str, CheckpointPolicy] = {
    name: _policy_saving(name, saveable)
    for name, saveable in (
        ("dots", cp.save_from_both_policies(cp.save_only_these_names(*PRODUCTS), _is_attention_product)),
        ("dots_no_batch", cp.save_only_these_names(*PRODUCTS)),
        ("offload_dots", keep("", offload=PRODUCTS).saveable),
    )
}

# Rows of POLICIES that are replaced in models with experts: expert products are kernels or have an axis of experts, so
# that policies must select them by these names.
EXPERT_PRODUCTS = ("expert_gate", "expert_up")
_EXPERT_PRODUCTS = cp.save_only_these_names(*EXPERT_PRODUCTS)
WITH_EXPERTS: Mapping[str, CheckpointPolicy] = {
    name: _policy_saving(name, saveable)
    for name, saveable in (
        ("dots", cp.save_from_both_policies(cp.dots_saveable, _EXPERT_PRODUCTS)),
        ("dots_no_batch", cp.save_from_both_policies(cp.dots_with_no_batch_dims_saveable, _EXPERT_PRODUCTS)),
        ("offload_dots", keep("", offload=(*PRODUCTS, "router_logits", *EXPERT_PRODUCTS)).saveable),
    )
}

# A policy that the caller resolves before a model is built, because it depends on the devices.
AUTO = "auto"

GRANULARITIES = ("block", "parts")

# Suffix of a name in a range of layers: the tensor is saved in host memory.
ON_HOST = "@host"


@dataclasses.dataclass(frozen=True)
class Segment:
    """A range of layers with the same remat policy.

    Fields:
      start, stop: the first layer, and the layer after the last.
      policy: the policy.
      name: the policy's text in the config.
    """

    start: int
    stop: int
    policy: CheckpointPolicy
    name: str

    @property
    def groups(self) -> int:
        """The number of checkpointed groups into which a nested policy divides the layers: the divisor of the number of
        layers nearest to its square root. It is 1 for other policies."""
        count = self.stop - self.start
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        return min(divisors, key=lambda d: abs(d - math.sqrt(count))) if self.policy.nested else 1


@dataclasses.dataclass(frozen=True)
class LayerPolicies:
    """The remat policy of every layer, from the config group `remat`.

    Args:
      policy: name of the policy, a row of POLICIES.
      save, offload: for the policy `custom`, the checkpoint names that are saved on the device and in host memory.
      layers: ranges of layers with another policy, such as "0-8:none", or with checkpoint names to save, such as
        "0-8:q_rot+v+block_in@host" ("@host" saves in host memory). `policy` applies to all other layers.
      granularity: "block" for one checkpoint per block, "parts" for a checkpoint around attention and one around the
        MLP.
      fp8: True if the weight matmuls of the blocks are in fp8.
      experts: True if the model has experts.

    Raises:
      ValueError: a policy, name or range is unknown. The message lists the valid values.
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
                    raise ValueError(f"remat.{key} has the unknown name {name!r}: choose from {', '.join(NAMES)}")
        both = set(self.save) & set(self.offload)
        if both:
            raise ValueError(f"remat.save and remat.offload both contain {min(both)!r}: give it in one of them only")
        used = [self.policy, *(self._range(text)[2] for text in self.layers)]
        if bool(self.save or self.offload) != ("custom" in used):
            raise ValueError(
                "remat.save and remat.offload belong to remat.policy=custom: set that policy and at "
                "least one checkpoint name, or leave both keys empty"
            )
        for name in used:
            self._check_policy_name(name)
        if self.granularity not in GRANULARITIES:
            raise ValueError(
                f"remat.granularity={self.granularity!r} is unknown: choose one of {', '.join(GRANULARITIES)}"
            )

    @property
    def asked(self) -> set[str]:
        """The checkpoint names that the user wrote in the config. The names that a policy of POLICIES saves are not
        included."""
        asked = {*self.save, *self.offload}
        for text in self.layers:
            name = self._range(text)[2]
            if name not in POLICIES:
                asked.update(self.row(name).names)
        return asked

    def _check_policy_name(self, name: str) -> None:
        if name in POLICIES:
            return
        words = [word.removesuffix(ON_HOST) for word in name.split("+")]
        if len(words) == 1 and words[0] not in NAMES:
            raise ValueError(f"remat.policy={name!r} is unknown: choose one of {', '.join((*POLICIES, AUTO))}")
        for word in words:
            if word not in NAMES:
                raise ValueError(f"remat.layers has the unknown name {word!r}: choose from {', '.join(NAMES)}")
        if len(set(words)) < len(words):
            raise ValueError(f"remat.layers={name!r} repeats a checkpoint name: give each name once")

    def _range(self, text: str) -> tuple[int, int, str]:
        match = re.fullmatch(r"(\d+)-(\d+):([\w+@]+)", str(text))
        if not match or int(match[1]) >= int(match[2]):
            raise ValueError(
                f"remat.layers={text!r} is not valid: write FIRST-END:POLICY, such as 0-8:none for the first 8 layers"
            )
        return int(match[1]), int(match[2]), match[3]

    def row(self, name: str) -> CheckpointPolicy:
        """Returns the remat policy for a text of the config: the name of a row of POLICIES, `custom`, or checkpoint
        names to save, joined by `+`."""
        known = {**POLICIES, **(WITH_EXPERTS if self.experts else {}), **(IN_FP8 if self.fp8 else {})}
        if name in known:
            return known[name] or keep("set by remat.save and remat.offload", self.save, self.offload)
        words = name.split("+")
        return keep(
            "set by its range of layers",
            [word for word in words if not word.endswith(ON_HOST)],
            [word.removesuffix(ON_HOST) for word in words if word.endswith(ON_HOST)],
        )

    def segments(self, n_layers: int) -> tuple[Segment, ...]:
        """Returns the ranges of layers with equal remat policy, in order. They cover all `n_layers` layers.

        Raises:
          ValueError: the ranges of the config overlap or extend past the last layer.
        """
        out: list[Segment] = []
        at = 0
        for start, stop, name in sorted(self._range(text) for text in self.layers):
            if start < at or stop > n_layers:
                raise ValueError(
                    f"remat.layers={start}-{stop}:{name} overlaps another range or extends past the {n_layers} layers: "
                    "change the range"
                )
            if start > at:
                out.append(Segment(at, start, self.row(self.policy), self.policy))
            out.append(Segment(start, stop, self.row(name), name))
            at = stop
        if at < n_layers:
            out.append(Segment(at, n_layers, self.row(self.policy), self.policy))
        return tuple(out)
