"""What a run prints before the first step: devices, parameters, batch, and the memory report of the step."""

import dataclasses
import math
import time
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from bytescope.memory.analyze import report_of
from bytescope.memory.costs import flops
from bytescope.memory.devices.targets import parse
from bytescope.memory.records import Report
from bytescope.memory.text.report import show
from bytescope.model.names import NAMES
from bytescope.train.config import flatten
from bytescope.train.optimizer.rules import describe_scaling
from bytescope.train.planning.run_peak import loop_overhead
from bytescope.train.program import Program


def parameters_by_component(params: Any) -> dict[str, int]:
    """Component (a second column of _COMPONENTS, or "other") -> number of parameters."""
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
    """Prints devices and mesh, data, parameters by component, the batch, and the learning rate that it leads to.

    data: the data source in words.
    """
    devices = program.mesh.devices.ravel()
    mesh = " x ".join(f"{axis} {count}" for axis, count in program.mesh.shape.items())
    counts = parameters_by_component(program.state.params)
    total = sum(counts.values())
    shares = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    (kernel, why), (matmul, how) = program.kernel, program.matmul
    rows = (
        ("devices", f"{len(devices)} x {devices[0].device_kind}{_in_processes()}, mesh {mesh}; jax {jax.__version__}"),
        ("data", data),
        ("model", f"{total:,} parameters: {shares}"),
        ("program", f"{program.config.precision.preset} precision, products {matmul} ({how}), "
                    f"remat {', '.join((*program.config.remat.layers, program.config.remat.policy))}, "
                    f"attention {kernel} ({why}), loss {program.config.loss.kind}"),
        ("remat", program.decided),
        ("batch", str(program.batch)),
        ("learning rate", describe_scaling(program.config.optimizer, program.batch)),
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for title, text in rows:
        if text:
            table.add_row(title, text)
    console.print(table)


def _in_processes() -> str:
    return f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The executable that runs, its memory report, and its hardware FLOPs over model FLOPs (HFU over MFU)."""

    step: jax.stages.Compiled
    report: Report
    flops_ratio: float


def compile_step(program: Program, console: Console) -> Compiled:
    """The step that will run, compiled, and the memory report of that very executable, which is printed.

    An executable from the persistent cache keeps no heap trace; it is not compiled again for the timeline, and its
    report says that lifetimes are derived.

    Raises:
      ValueError: an offload policy that moves nothing.
    """
    began = time.perf_counter()
    with console.status("compiling"):
        compilation = program.compile_for_report()
    seconds = time.perf_counter() - began
    work = flops.count(compilation.jaxpr)
    report = report_of(compilation, target=parse("local"), config=flatten(program.config), names=NAMES,
                       loop=loop_overhead(program))
    console.print(f"compiled in {seconds:.1f} s; memory of the step:")
    show(report, console)
    if work.recomputed:
        console.print(f"recomputes {100 * work.recompute_fraction:.1f} % of the model's FLOPs")
    return Compiled(compilation.compiled, report, work.hardware_flops / max(work.model_flops, 1))


# Dtype -> the units that multiply it, the first that a device has: jax sends float32 products to TF32 units.
_UNITS = {"float32": ("tf32", "fp32"), "bfloat16": ("bf16",), "float16": ("fp16",)}


def peak_flops(program: Program) -> float | None:
    """Peak dense FLOP/s of one device in the compute dtype; None for a device that memory/devices/chips.py lacks."""
    known = parse("local").peak_flops
    units = _UNITS.get(jnp.dtype(program.precision.compute).name, ())
    return next((known[unit] for unit in units if unit in known), None)
