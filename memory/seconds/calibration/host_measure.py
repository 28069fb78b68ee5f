"""Measures how much host memory libraries and compilers take on this machine (`bytescope calibrate --host`).

The shipped constants (`host.host_terms.HostRates`) were measured with whole commands. A calibration compiles three
small programs instead, and multiplies each constant by a ratio: the host memory that a small program takes on this
machine, divided by the host memory that it took on the machine where the shipped constants were measured.

Each case of `CASES` is measured in a process of its own, because a process keeps memory that it once allocated, so the
second compile in a process needs less new memory than the first one.

    JAX_PLATFORMS=cpu python -m bytescope.memory.seconds.calibration.host_measure imports

prints a JSON object: name of a measured size -> bytes of host memory.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bytescope.memory import environment
from bytescope.memory.errors import ReportError, in_one_line
from bytescope.memory.host.host_terms import RATES
from bytescope.memory.host.process_memory import host_phase, phase_peaks, resident

# Layers of the three compiled programs, and of the three that are only traced. A traced layer takes 69 kB, so only a
# program of many layers takes clearly more than the free memory that a process has left from its start.
LAYERS = (4, 16, 48)
TRACED_LAYERS = (16, 96, 256)
# Maximum seconds of one case.
_TIMEOUT_S = 600


class CaseError(ReportError):
    """A measurement in a process of its own failed. The message is the last line of the output of that process,
    or says that the process took too long."""


def run_case(name: str, *arguments: object) -> dict[str, int]:
    """Runs one case of `CASES` in a process of its own. Returns name of a measured size -> bytes
    of host memory. Raises CaseError if the process fails or takes more than `_TIMEOUT_S` seconds.

    name: a key of `CASES`. arguments: the arguments of the measurement, such as 16 layers and the target
    "h100".
    """
    words = [sys.executable, "-m", "bytescope.memory.seconds.calibration.host_measure", name, *map(str, arguments)]
    # The cases run on the CPU, without a compilation cache, which would replace the compiler.
    given = environment.child_variables({environment.PLATFORMS: "cpu"})
    env = {name: value for name, value in given.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired as error:
        raise CaseError(f"took more than {_TIMEOUT_S} s: end other programs and calibrate again") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise CaseError(in_one_line((done.stderr.strip().splitlines() or ["no output"])[-1])[:120])
    return dict(json.loads(lines[-1]))


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fits a line to points (x, y) by least squares. Returns (y at x = 0, slope). A negative slope becomes 0, and y at
    x = 0 is then the mean of y. A negative y at x = 0 becomes 0 without a change of the slope."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 0.0) if spread else 0.0
    return max(mean_y - slope * mean_x, 0.0), slope


@dataclasses.dataclass(frozen=True)
class HostSample:
    """The host memory that a library or compiler takes, measured on this machine.

    Fields:
        words: what was measured, such as "jax's CUDA plugin" or "XLA's compiler for CPUs, per layer".
        bytes: bytes of host memory on this machine.
        reference: bytes of host memory on the machine where the shipped constants were measured.
        constants: names of the fields of `HostRates` that are multiplied by `bytes` / `reference`.
    """

    words: str
    bytes: float
    reference: float
    constants: tuple[str, ...]


# What is measured, in words -> (its size in bytes where the shipped constants of `HostRates` were measured, the
# constants that are proportional to it): x86-64 Linux, Python 3.11, jax 0.10.2, CUDA 13, glibc 2.36, November 2026.
# Three runs differed by 6 % at most.
_REFERENCES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "Python and jax": (172_800_000, ("python",)),
    "flax, optax and Orbax": (48_300_000, ("trainer", "flax")),
    "jax's CUDA plugin": (83_300_000, ("gpu_plugin",)),
    "a traced program": (17_230_000, ("traced",)),
    "a traced program, per layer": (69_000, ("traced_equation",)),
    "XLA's compiler for CPUs": (55_700_000, ("cpu_compile",)),
    "XLA's compiler for CPUs, per layer": (455_000, ("cpu_compile_equation", "cpu_compile_repeated")),
    "XLA's compiler for GPUs": (101_700_000, ("gpu_compile", "described_compile")),
    "XLA's compiler for GPUs, per layer": (
        1_510_000,
        ("gpu_compile_equation", "gpu_compile_repeated", "described_compile_equation", "described_compile_repeated"),
    ),
}


def constants_of(samples: Iterable[HostSample]) -> dict[str, float]:
    """Returns the constants for this machine: name of a field of `HostRates` -> the shipped bytes, multiplied by
    `bytes` / `reference` of the sample that names this field in `constants`."""
    constants: dict[str, float] = {}
    for sample in samples:
        for name in sample.constants:
            constants[name] = round(getattr(RATES, name) * sample.bytes / sample.reference)
    return constants


def _imports() -> dict[str, float]:
    sizes = run_case("imports")
    measured: dict[str, float] = {"Python and jax": sizes["jax"]}
    if "trainer" in sizes:
        measured["flax, optax and Orbax"] = sizes["trainer"] - sizes["jax"]
    return measured


def _line(name: str, case: str, part: str, layers: Sequence[int], *arguments: str) -> dict[str, float]:
    """Runs a case for each number of layers. Returns `name` -> bytes without layers, and bytes per layer."""
    points = [(number, run_case(case, number, *arguments)[part]) for number in layers]
    at_zero, per_layer = line_through(points)
    return {name: at_zero, f"{name}, per layer": per_layer}


# What a measurement is about, in words -> function that returns sizes: key of `_REFERENCES` -> bytes.
MEASUREMENTS: dict[str, Callable[[], dict[str, float]]] = {
    "libraries": _imports,
    "a traced program": lambda: _line("a traced program", "tracing", "traced", TRACED_LAYERS),
    "XLA's compiler for CPUs": lambda: _line("XLA's compiler for CPUs", "compiler", "peak", LAYERS, "cpu"),
    "jax's CUDA plugin": lambda: {"jax's CUDA plugin": run_case("plugin", "h100")["bytes"]},
    "XLA's compiler for GPUs": lambda: _line("XLA's compiler for GPUs", "compiler", "peak", LAYERS, "h100"),
}


def measure_host(report_progress: Callable[[Sequence[str], int], None]) -> tuple[list[HostSample], dict[str, str]]:
    """Measures on this machine how much host memory libraries and compilers take (`MEASUREMENTS`), each in processes of
    its own. Returns (the samples, name of each measurement that failed -> error message).

    report_progress: called before each measurement with two arguments: a list with one item, the name of the
        measurement, and the number of measurements that are finished.
    """
    samples: list[HostSample] = []
    left_out: dict[str, str] = {}
    for done, (name, measurement) in enumerate(MEASUREMENTS.items()):
        report_progress([name], done)
        try:
            samples += [HostSample(words, size, *_REFERENCES[words]) for words, size in measurement().items()]
        except CaseError as error:
            left_out[name] = str(error)
    return samples, left_out


# ---- the cases, each in a process of its own ----------------------------------------------------------------------


def imports() -> dict[str, int]:
    """Imports libraries in this process. Returns the resident bytes of the process: "jax" after jax has started its CPU
    device, and "trainer" after flax, optax and Orbax are imported too. If one of these three libraries is not
    installed, "trainer" is missing."""
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()
    import jax

    jax.devices()
    sizes = {"jax": _resident()}
    try:
        import flax.nnx
        import optax
        import orbax.checkpoint
    except ImportError:
        return sizes
    del flax, optax, orbax
    sizes["trainer"] = _resident()
    return sizes


def plugin(target: str) -> dict[str, int]:
    """Returns "bytes": the growth of this process's resident memory when jax, which has already started its CPU device,
    loads the plugin for the devices of a target, such as "h100". The devices need not be present."""
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()
    import jax

    jax.devices()
    before = _resident()
    targets.parse(target).devices()
    return {"bytes": max(_resident() - before, 0)}


def tracing(layers: int) -> dict[str, int]:
    """Traces and lowers the gradient of a program with unrolled layers. Returns "traced": the growth of this process's
    resident memory, in bytes.

    layers: number of layers.
    """
    lower = _program(layers, "cpu")
    start = _resident()
    lowered = lower()
    traced = _resident() - start
    del lowered
    return {"traced": traced}


def compiler(layers: int, target: str) -> dict[str, int]:
    """Compiles the gradient of a program with unrolled layers. Returns "peak": the maximum of this process's resident
    memory while XLA compiles, minus the resident memory just before XLA compiles, in bytes. For GPUs, XLA emits the
    machine code of all kernels, as on a machine with the GPU; the constants in `HostRates` are for such a compile.

    layers: number of layers. target: the devices to compile for, such as "cpu" or "h100"; they need not be present.
    """
    from bytescope.memory.devices import machine_code
    from bytescope.memory.devices.compiler import compile_lowered

    lowered = _program(layers, target)()
    # A report leaves machine code out, unless the user has chosen a CUDA folder. XLA itself has read the flags before.
    environment.add_xla_flags(f"--{machine_code.CUDA_FOLDER}=default")
    before = _resident()
    with host_phase("compile"):
        compile_lowered(lowered)
    return {"peak": phase_peaks()["compile"] - before}


def _program(layers: int, target: str) -> Callable[[], Any]:
    """Returns a function that traces and lowers the gradient of `layers` layers for `target`."""
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()
    import jax
    import jax.numpy as jnp

    place = jax.sharding.SingleDeviceSharding(targets.parse(target).devices()[0])

    def loss(weights: Any, x_BD: Any) -> Any:
        for up_DF, down_FD in weights:
            scaled_BD = x_BD * jax.lax.rsqrt(jnp.mean(x_BD * x_BD, -1, keepdims=True) + 1e-6)
            x_BD = x_BD + jax.nn.silu(scaled_BD @ up_DF) @ down_FD
        return jnp.mean(x_BD * x_BD)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)

    weights = [(array(256, 512), array(512, 256)) for _ in range(layers)]
    return lambda: jax.jit(jax.grad(loss)).trace(weights, array(128, 256)).lower()


def _resident() -> int:
    return resident()[0] or 0


CASES: Mapping[str, Callable[..., dict[str, int]]] = {
    "imports": imports,
    "plugin": plugin,
    "tracing": lambda layers: tracing(int(layers)),
    "compiler": lambda layers, target: compiler(int(layers), target),
}


if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](*sys.argv[2:])))
