"""Predicts the host memory of the phases "start", "trace", "compile" and "analyze", which all commands share.

A process keeps most of what these phases allocate, so each later phase has terms for it too: the libraries, the traced
program, and the part of the compiler's memory that XLA does not free.

The constants are in `HostRates`. They were measured on x86-64 Linux with Python 3.11, jax 0.10.2, CUDA 13, glibc 2.36
(November 2026, `tests/bench/host_memory.py report report_program`, differences between phases). A file that `bytescope
calibrate --host` wrote replaces them (`use_host_rates`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from bytescope.memory.errors import ReportError
from bytescope.memory.records.host_record import HostTerm
from bytescope.memory.records.report_json import is_number
from bytescope.memory.units import KIB, MIB

_GPUS = ("cuda", "rocm", "gpu")
LIBRARIES, TRACED, COMPILER, KEPT = (
    "Python, jax and libraries",
    "traced program",
    "XLA's compiler",
    "kept after compiling",
)


@dataclasses.dataclass(frozen=True)
class HostRates:
    """Host memory in bytes from which the terms of one process are computed.

    Fields:
        python: Python with jax, numpy and the modules of a command: VmRSS at the end of the phase "start" of
            `report --program=... h100`, less `gpu_plugin`.
        trainer: flax, optax, orbax, tensorstore, grain and the tokenizers: the increase of "start" in a report of a
            config.
        gpu_plugin: jax's CUDA plugin, loaded without NVIDIA's libraries.
        gpu_libraries: NVIDIA's libraries, which jax loads before the plugin on a machine with a GPU.
        traced, traced_equation: jax's caches after tracing and lowering, and the bytes per equation.
        gpu_compile, gpu_compile_equation: peak of XLA:GPU's compiler, and the bytes per equation.
        gpu_kept: the fraction of this peak that remains after the compile.
        cpu_compile, cpu_compile_equation, cpu_kept: the same for XLA:CPU, whose code generator is LLVM.
    """

    python: int = 178 * MIB
    trainer: int = 70 * MIB
    gpu_plugin: int = 75 * MIB
    gpu_libraries: int = 270 * MIB
    traced: int = 10 * MIB
    traced_equation: int = 16 * KIB
    gpu_compile: int = 115 * MIB
    gpu_compile_equation: int = 140 * KIB
    gpu_kept: float = 0.95
    cpu_compile: int = 130 * MIB
    cpu_compile_equation: int = 100 * KIB
    cpu_kept: float = 0.35

    def replaced(self, measured: Mapping[str, float]) -> HostRates:
        """Returns the constants with those in `measured` (name of a field -> value) replaced. Raises ReportError for an
        unknown name, and for a value that is not a number of 0 or more."""
        shipped, values = vars(self), {}
        for name, value in measured.items():
            if name not in shipped:
                fault = f"{name!r:.40} is an unknown constant of host memory"
            elif not is_number(value) or value < 0:
                fault = f"the constant {name} of host memory is {value!r:.40}, which is not a number of 0 or more"
            else:
                values[name] = type(shipped[name])(value)
                continue
            raise ReportError(f"{fault}: run bytescope calibrate --host again")
        return dataclasses.replace(self, **values)


RATES = HostRates()
# The constants that this process uses, as a list with one item.
_CURRENT = [RATES]


def host_rates() -> HostRates:
    """Returns the constants that this process uses: those of the file of --rates, if `bytescope calibrate --host` wrote
    it, otherwise `RATES`."""
    return _CURRENT[0]


def use_host_rates(measured: Mapping[str, float] | None) -> None:
    """Sets constants of this process: name of a field of `HostRates` -> measured value. Other constants keep the values
    in `RATES`. None restores all of them. Raises ReportError if a name or a value is not valid."""
    _CURRENT[:] = [RATES.replaced(measured or {})]


@dataclasses.dataclass(frozen=True)
class ProgramSize:
    """The size of a traced program, which is known before it is compiled.

    Fields:
        equations: number of equations of its jaxpr. The body of a loop counts once, a function that is called twice
            counts twice.
        arguments: number of array arguments.
        devices: number of devices that the program is compiled for.
    """

    equations: int
    arguments: int = 0
    devices: int = 1


def start_terms(
    platform: str,
    phases: Iterable[str] = ("start",),
    *,
    trainer: bool = True,
    gpu_present: bool = False,
    rates: HostRates | None = None,
) -> tuple[HostTerm, ...]:
    """Returns what Python and the imported libraries hold in one process, a term for each phase.

    Args:
        platform: the platform that the process compiles for, such as "cpu" or "cuda".
        phases: keys of `HOST_PHASES`.
        trainer: whether the process imports the trainer's libraries.
        gpu_present: whether the machine has a GPU of this platform.
        rates: the constants; None for `host_rates()`.
    """
    rates = rates or host_rates()
    size, parts = rates.python, ["Python and jax"]
    if trainer:
        size, parts = size + rates.trainer, [*parts, "the trainer's libraries"]
    if platform in _GPUS:
        size += rates.gpu_plugin + (rates.gpu_libraries if gpu_present else 0)
        parts.append("jax's GPU plugin")
    source = f"{', '.join(parts)}; measured after their import"
    return tuple(HostTerm(phase, LIBRARIES, size, source) for phase in phases)


def compile_terms(
    size: ProgramSize, platform: str, later: Iterable[str] = ("analyze",), *, rates: HostRates | None = None
) -> tuple[HostTerm, ...]:
    """Returns the memory that tracing and compiling a program adds to the libraries, in the phases "trace" and
    "compile" and in the phases after them.

    Args:
        size: the traced program.
        platform: the platform that the program is compiled for, such as "cpu" or "cuda".
        later: phases after the compile, keys of `HOST_PHASES`.
        rates: the constants; None for `host_rates()`.
    """
    rates = rates or host_rates()
    count = f"{size.equations:,} equations"
    traced = rates.traced + rates.traced_equation * size.equations
    if platform == "cpu":
        compiled = rates.cpu_compile + rates.cpu_compile_equation * size.equations
        kept = int(compiled * rates.cpu_kept)
    else:
        compiled = rates.gpu_compile + rates.gpu_compile_equation * size.equations
        kept = int(compiled * rates.gpu_kept)
    later = tuple(later)
    return (
        *(HostTerm(phase, TRACED, traced, f"jax's caches for {count}") for phase in ("trace", "compile", *later)),
        HostTerm("compile", COMPILER, compiled, f"a linear model of XLA's compiler, {count}"),
        *(HostTerm(phase, KEPT, kept, "memory that XLA's compiler does not free") for phase in later),
    )
