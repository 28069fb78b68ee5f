"""Formulas for training state: parameters, gradients and optimizer state, in bytes on a device and on its host.

Plain arithmetic without a compiler or jax. Norms, biases and learned positions count as parameters like any other.
Temporaries of the update are not included. Callers describe their precision (`PrecisionBytes`) and optimizer
(`OptimizerBytes`); `MIXED` and `ADAM` are those of the papers.
"""

from __future__ import annotations

from typing import NamedTuple

from bytescope.memory.formulas.model_shape import StepLayout

ALONE = StepLayout()


class PrecisionBytes(NamedTuple):
    """The bytes per parameter of the training state, and the bytes per element of activations, under a mixed-precision
    recipe.

    Fields:
        name: the name of the recipe. summary: its description for users.
        params, gradients: bytes per parameter and per gradient.
        master: bytes per parameter of a master copy in higher precision, 0 if there is none.
        state: bytes per value of optimizer state.
        activation: bytes per element of an activation.
        operand: bytes per element of a tensor that is kept in lower precision as a matmul operand; 0 means
            `activation`.
    """

    name: str
    summary: str
    params: int
    gradients: int
    master: int
    state: int
    activation: int
    operand: float = 0.0


class OptimizerBytes(NamedTuple):
    """The size of an optimizer's state.

    Fields:
        name: the optimizer's name. summary: its description for users.
        states: number of values per parameter, such as 2 for Adam.
        itemsize: bytes per value; 0 means the size that the mixed-precision recipe gives (`PrecisionBytes.state`).
    """

    name: str
    summary: str
    states: int
    itemsize: float = 0.0


# 16 bytes with Adam: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1: 2 + 2 + (4 + 4 + 4).
MIXED = PrecisionBytes("mixed", "16-bit parameters and gradients, float32 master copy", 2, 2, 4, 4, 2)
ADAM = OptimizerBytes("adamw", "two moments (Kingma & Ba 2015, arXiv 1412.6980)", 2)

# Stage of ZeRO -> roles that the data-parallel ranks shard (Rajbhandari et al. 2020, section 5). With Adam in mixed
# precision, the bytes per parameter over N ranks are 16; 4 + 12/N; 2 + 14/N; 16/N.
ZERO: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("optimizer",),
    2: ("optimizer", "gradients"),
    3: ("optimizer", "gradients", "params"),
}

ROLES = {"params": ("params",), "gradients": ("gradients",), "optimizer": ("master", "moments")}
# Offload setting -> parts in host memory. If there is no 16-bit copy of the parameters, `master` is their only copy.
# Gradients of parameters in host memory are moved there too.
OFFLOAD = {
    "none": (),
    "optimizer": ("moments",),
    "params": ("master", "gradients"),
    "both": ("moments", "master", "gradients"),
}


def state_bytes_per_parameter(
    precision: PrecisionBytes = MIXED, optimizer: OptimizerBytes = ADAM, layout: StepLayout = ALONE, routed: float = 0.0
) -> dict[str, float]:
    """Returns the bytes per parameter on a device of `params`, `gradients` and `optimizer` (master copy and moments).

    layout: how the step is sharded over devices. routed: the fraction of the parameters that are in routed experts.
    Tensor and pipeline parallelism are assumed to shard all parameters, although norms are replicated.
    """
    each = parts_per_parameter(precision, optimizer, layout, routed)
    return {role: sum(each[part] for part in parts) for role, parts in ROLES.items()}


def parts_per_parameter(
    precision: PrecisionBytes, optimizer: OptimizerBytes, layout: StepLayout, routed: float = 0.0
) -> dict[str, float]:
    """Returns the bytes per parameter on a device of `params`, `gradients`, `master` (master copy) and `moments`.

    layout: how the step is sharded over devices. routed: the fraction of the parameters that are in routed experts.
    """
    unsharded = {
        "params": precision.params,
        "gradients": precision.gradients,
        "master": precision.master,
        "moments": optimizer.states * (optimizer.itemsize or precision.state),
    }
    sizes = {}
    for role, parts in ROLES.items():
        held_share = layout.held_share(role in ZERO[layout.zero], routed)
        for part in parts:
            sizes[part] = unsharded[part] * held_share
    return sizes


def state_bytes(
    parameters: float,
    at_once: float,
    *,
    precision: PrecisionBytes = MIXED,
    optimizer: OptimizerBytes = ADAM,
    layout: StepLayout = ALONE,
    offload: str = "none",
    fused: bool = False,
    routed: float = 0.0,
) -> dict[str, float]:
    """Returns role ("params", "gradients" or "optimizer") -> bytes of training state on a device. The key "host" has
    the bytes of state in host memory.

    Args:
        parameters: number of parameters.
        at_once: with `fused`, the maximum number of parameters whose gradients exist at the same time.
        offload: which state is in host memory: "none", "optimizer", "params" or "both".
        fused: whether each layer is updated during the backward pass (Lv et al. 2023, arXiv 2306.09782).
        routed: the fraction of the parameters that are in routed experts.

    Not included: the device copy of the offloaded layer that is being computed or updated (Ren et al. 2021, arXiv
    2101.06840).
    """
    each = parts_per_parameter(precision, optimizer, layout, routed)
    sizes = {part: size * parameters for part, size in each.items()}
    if fused:
        sizes["gradients"] *= at_once / parameters
    in_host_memory = set(OFFLOAD[offload])
    if "master" in in_host_memory and not sizes["master"]:
        in_host_memory = in_host_memory - {"master"} | {"params"}
    if fused:
        in_host_memory.discard("gradients")
    by_role = {}
    for role, parts in ROLES.items():
        by_role[role] = sum(sizes[part] for part in parts if part not in in_host_memory)
    by_role["host"] = sum(sizes[part] for part in sorted(in_host_memory))
    return by_role
