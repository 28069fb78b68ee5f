"""What experts need of a mesh, and what they cannot be combined with."""

import math

from ml_collections import ConfigDict

from bytescope.train.parallel.layout import Layout


def check_experts(config: ConfigDict, layout: Layout) -> None:
    """Raises ValueError where experts cannot be shared out over the mesh, or be combined with something else."""
    model, parts = config.model, layout.mesh.shape["expert"]
    asked = f"model.experts={model.experts}"
    if not model.experts:
        if parts > 1:
            raise ValueError(
                f"mesh.expert={parts} with model.experts=0: there are no experts to share; set "
                "mesh.expert=1, and mesh.fsdp for these devices"
            )
        return
    if model.experts % parts:
        near = math.gcd(model.experts, parts)
        raise ValueError(
            f"{asked} is not divisible by mesh.expert={parts}: every device holds as many experts; set "
            f"mesh.expert={near}, and mesh.fsdp for the other devices"
        )
    slots, dispatch = model.moe_kernel == "capacity", config.mesh.dispatch
    if parts > 1 and dispatch != "auto" and slots != (dispatch == "all_to_all"):
        remedy = "mesh.dispatch=all_to_all" if slots else "model.moe_kernel=capacity"
        raise ValueError(
            f"mesh.dispatch={dispatch} with model.moe_kernel={model.moe_kernel}: slots of fixed number go "
            f"by all_to_all, rows of varying number by the others; set {remedy}, or mesh.dispatch=auto"
        )
    if config.precision.preset == "fp8":
        raise ValueError(
            f"precision.preset=fp8 with {asked}: products of experts are not computed in fp8; choose "
            "precision.preset=bf16"
        )
    if config.lora.base != "bf16":
        raise ValueError(
            f"lora.base={config.lora.base} with {asked}: weights of experts are not quantized; set lora.base=bf16"
        )
