"""Measures the constants of the host ledger on this machine (`bytescope calibrate --host`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from bytescope.memory.errors import ReportError, in_one_line
from bytescope.memory.seconds.calibration.host_cases import LAYERS

# Maximum seconds of one case.
_TIMEOUT_S = 600


class CaseError(ReportError):
    """A case failed; the text is its last line of output."""


def run_case(name: str, *arguments: object) -> dict[str, int]:
    """Runs a case of `host_cases` in a process of its own. Returns its bytes and counts. Raises CaseError if it
    fails."""
    words = [sys.executable, "-m", "bytescope.memory.seconds.calibration.host_cases", name, *map(str, arguments)]
    # The cases run on the CPU, without a compilation cache, which would replace the compiler.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment["JAX_PLATFORMS"] = "cpu"
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise CaseError(f"it took more than {_TIMEOUT_S} s") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise CaseError(in_one_line((done.stderr.strip().splitlines() or ["no output"])[-1])[:120])
    return dict(json.loads(lines[-1]))


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the line with the least squared error through points (x, y), as (y at 0, slope). Neither is negative."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 0.0) if spread else 0.0
    return max(mean_y - slope * mean_x, 0.0), slope


def _imports() -> dict[str, float]:
    sizes = run_case("imports")
    measured: dict[str, float] = {"jax_bytes": sizes["jax"]}
    if "trainer" in sizes:
        measured["trainer_bytes"] = sizes["trainer"] - sizes["jax"]
    return measured


def _plugin() -> dict[str, float]:
    return {"gpu_plugin_bytes": run_case("plugin", "h100")["bytes"]}


def _compiler(target: str, prefix: str) -> dict[str, float]:
    points = []
    for layers in LAYERS:
        sizes = run_case("compiler", layers, target)
        points.append((sizes["equations"], sizes["bytes"]))
    base, slope = line_through(points)
    return {f"{prefix}_compile_bytes": base, f"{prefix}_equation_bytes": slope}


def _checkpoint() -> dict[str, float]:
    sizes = run_case("checkpoint")
    return {f"{phase}_share": sizes[phase] / sizes["bytes"] for phase in ("save", "restore")}


# What a measurement is about, in words -> function that returns constants: name of a field of `HostConstants` -> value.
MEASUREMENTS: dict[str, Callable[[], dict[str, float]]] = {
    "libraries": _imports,
    "XLA's compiler for CPUs": lambda: _compiler("cpu", "cpu"),
    "jax's CUDA plugin": _plugin,
    "XLA's compiler for GPUs": lambda: _compiler("h100", "gpu"),
    "Orbax": _checkpoint,
}


def measure_host(report_progress: Callable[[Sequence[str], int], None]) -> tuple[dict[str, float], dict[str, str]]:
    """Measures all constants. Returns the constants (name of a field of `HostConstants` -> value), and what could not
    be measured (words -> reason).

    report_progress: is called before each measurement with its words and the number of finished measurements.
    """
    constants: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for done, (name, measurement) in enumerate(MEASUREMENTS.items()):
        report_progress([name], done)
        try:
            constants |= measurement()
        except CaseError as error:
            left_out[name] = str(error)
    return constants, left_out
