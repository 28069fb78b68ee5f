"""Rows of a comparison by hand, with figures that hang together."""

from bytescope.memory.plan.rows import Row

GIB = 2**30


def row(policy="none", gib=10.0, share=0.0, limit=40, **more):
    """A row that compiled, with figures that hang together."""
    size = int(gib * GIB)
    overrides = {"remat.policy": policy, **more.pop("keys", {})}
    breakdown = {"params": size // 2, "residuals": size - size // 2}
    return Row(overrides, peak_bytes=size, allocated_bytes=size, temp_bytes=size // 2, host_bytes=0,
               residual_bytes=size - size // 2, recompute_flops_fraction=share, kernel_recompute_flops=0.0,
               model_flops=6e12, hardware_flops=6e12 * (1 + share), compile_seconds=3.0, breakdown=breakdown,
               limit_bytes=limit * GIB, fits=size <= limit * GIB, **more)


def some_rows():
    """Three on the front, one behind it, one that failed."""
    return [row("none", 60), row("dots", 30, 0.05), row("worse", 35, 0.06), row("full", 12, 1 / 3),
            Row({"remat.policy": "ful"}, status="remat.policy='ful': choose another")]
