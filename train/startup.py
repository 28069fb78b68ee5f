"""What the user sees before the first step: devices, parameters, batch, and where the memory goes."""

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from memory.limits import limit_bytes
from memory.records import Report
from train.failures import size
from train.program import Program

def parameters_by_component(params: Any) -> dict[str, int]:
    """Component (embedding, attention, mlp, norms, head) -> number of parameters."""
    counts: dict[str, int] = defaultdict(int)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [str(key.key) for key in path]
        counts[_component(keys)] += math.prod(leaf.shape)
    return dict(counts)


# First match wins: (part of the path, component).
_COMPONENTS = (("norm", "norms"), ("attention", "attention"), ("mlp", "mlp"), ("w_token", "embedding"),
               ("w_position", "positions"), ("w_head", "head"))


def _component(keys: list[str]) -> str:
    return next((name for part, name in _COMPONENTS if any(part in key for key in keys)), "other")


def show_program(console: Console, program: Program, data: str) -> None:
    """Devices and mesh, data, parameters by component, batch algebra."""
    devices = program.mesh.devices.ravel()
    mesh = " x ".join(f"{axis} {count}" for axis, count in program.mesh.shape.items())
    counts = parameters_by_component(program.state.params)
    total = sum(counts.values())
    shares = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    kernel, why = program.kernel
    rows = (
        ("devices", f"{len(devices)} x {devices[0].device_kind}, mesh {mesh}; jax {jax.__version__}"),
        ("data", data),
        ("model", f"{total:,} parameters: {shares}"),
        ("program", f"{program.config.precision.preset} precision, remat {program.config.remat.policy}, "
                    f"attention {kernel} ({why}), loss {program.config.loss.kind}"),
        ("batch", str(program.batch)),
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def compile_step(program: Program, console: Console) -> tuple[jax.stages.Compiled, Report]:
    """The compiled step and its memory report, shown."""
    with console.status("compiling"):
        began = time.perf_counter()
        compiled = program.compile()
        seconds = time.perf_counter() - began
    stats = compiled.memory_analysis()
    allocated = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    limit = limit_bytes(program.mesh.local_devices[0])
    report = Report(peak_bytes=allocated, allocated_bytes=allocated, breakdown={}, limit_bytes=limit, fits=allocated<=limit)
    console.print(f"compiled in {seconds:.1f} s; {size(allocated)} of {size(limit)}")
    return compiled, report


def peak_flops(program: Program) -> float | None:
    """Peak FLOP/s of one device in the compute dtype, where it is known."""
    return None


def versions() -> Mapping[str, str]:
    """Versions that change compiled programs."""
    import flax
    import jaxlib
    import optax

    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "flax": flax.__version__,
            "optax": optax.__version__}
