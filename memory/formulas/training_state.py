"""Bytes of training state from the published formulas: parameters, gradients, optimizer, on a device and on its host.

Plain arithmetic, no compiler, no jax; sizes are bytes on one device. Norms, biases and learned positions count as
parameters like all others; temporaries of the update are left out. Callers pass rows for their precisions and
optimizers; the rows of the papers are `MIXED` and `ADAM`.
"""

from __future__ import annotations

from typing import NamedTuple

from bytescope.memory.formulas.model_shape import StepLayout

ALONE = StepLayout()


class PrecisionBytes(NamedTuple):
    """Bytes per parameter of each role, and bytes of an activation's element.

    name: the caller's name of the row. master: a second copy of the parameters, in more bits. operand: bytes of an
    element that is kept as a matmul operand, if it has fewer bits; 0 for the bytes of an activation's element.
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
    """The state of an optimizer. states: numbers per parameter; itemsize: bytes of a number, 0 for the precision's."""

    name: str
    summary: str
    states: int
    itemsize: float = 0.0


# 16 bytes with Adam: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1: 2 + 2 + (4 + 4 + 4).
MIXED = PrecisionBytes("mixed", "16-bit parameters and gradients, float32 master copy", 2, 2, 4, 4, 2)
ADAM = OptimizerBytes("adamw", "two moments (Kingma & Ba 2015, arXiv 1412.6980)", 2)

# Stage of ZeRO -> roles that each data-parallel rank has a shard of (Rajbhandari et al. 2020, section 5). With Adam in
# mixed precision, bytes per parameter over N ranks: 16; 4 + 12/N; 2 + 14/N; 16/N.
ZERO: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("optimizer",),
    2: ("optimizer", "gradients"),
    3: ("optimizer", "gradients", "params"),
}

ROLES = {"params": ("params",), "gradients": ("gradients",), "optimizer": ("master", "moments")}
# Parts in host memory. `master` is the only copy of the parameters if there is no narrower one. Gradients of parameters
# in host memory go there too.
OFFLOAD = {
    "none": (),
    "optimizer": ("moments",),
    "params": ("master", "gradients"),
    "both": ("moments", "master", "gradients"),
}


def state_bytes_per_parameter(
    precision: PrecisionBytes = MIXED, optimizer: OptimizerBytes = ADAM, layout: StepLayout = ALONE, routed: float = 0.0
) -> dict[str, float]:
    """Bytes per parameter of `params`, `gradients` and `optimizer` (master copy and moments) on a device; `routed`: the
    share of routed experts in the parameters.

    Tensor and pipeline parallelism shard all of it; norms, which stay replicated, are left out.
    """
    each = parts_per_parameter(precision, optimizer, layout, routed)
    return {role: sum(each[part] for part in parts) for role, parts in ROLES.items()}


def parts_per_parameter(
    precision: PrecisionBytes, optimizer: OptimizerBytes, layout: StepLayout, routed: float = 0.0
) -> dict[str, float]:
    """Bytes per parameter on a device by part: `params`, `gradients`, `master` and `moments`; `routed` as above."""
    unsharded = {
        "params": precision.params,
        "gradients": precision.gradients,
        "master": precision.master,
        "moments": optimizer.states * (optimizer.itemsize or precision.state),
    }
    sizes = {}
    for role, parts in ROLES.items():
        held = layout.held(role in ZERO[layout.zero], routed)
        for part in parts:
            sizes[part] = unsharded[part] * held
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
    """Returns the bytes of each role on a device, and `host`: its bytes of state in host memory.

    routed: the share of routed experts in the parameters. fused: each layer is updated in the backward pass (Lv et al.
    2023, arXiv 2306.09782), so that at most the gradients of `at_once` parameters exist. offload: a row of OFFLOAD; the
    copy on the device of the layer that is computed or updated is left out (Ren et al. 2021, arXiv 2101.06840).
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
    found = {}
    for role, parts in ROLES.items():
        found[role] = sum(sizes[part] for part in parts if part not in in_host_memory)
    found["host"] = sum(sizes[part] for part in sorted(in_host_memory))
    return found
