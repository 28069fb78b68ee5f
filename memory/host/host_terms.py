"""Predicts the host memory of the phases "start", "trace", "compile" and "analyze", which many commands share.

The predicted host memory of a phase is a sum of parts (terms, `HostTerm`). A process keeps most of what these phases
allocate, so each later phase has terms too for the libraries, for the traced program, and for the part of the
compiler's memory that XLA does not free.

The constants are in `HostRates`. They were measured on x86-64 Linux with Python 3.11, jax 0.10.2, CUDA 13, glibc 2.36
(November 2026, `tests/bench/host_memory.py report report_program`, differences between phases). A file that `bytescope
calibrate --host` wrote replaces them (`use_host_rates`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.jaxprs import bodies, distinct_jaxprs, inner_jaxpr
from bytescope.memory.records.host_record import HostTerm
from bytescope.memory.records.result import is_number
from bytescope.memory.units import KIB, MIB

_GPUS = ("cuda", "rocm", "gpu")
# jax's primitives of cuDNN's attention (jax/_src/cudnn/fused_attention_stablehlo.py).
_CUDNN_ATTENTION = "dot_product_attention"
# Primitives that only move values, or only call a function that is counted itself.
_NO_ARITHMETIC = {
    *("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "transpose", "slice", "copy"),
    *("jit", "pjit", "name"),
}
LIBRARIES, TRACED, CUDNN, COMPILER, KEPT, ANALYSIS = (
    "Python, jax and libraries",
    "traced program",
    "cuDNN",
    "XLA's compiler",
    "kept after compiling",
    "reading the compiled program",
)


@dataclasses.dataclass(frozen=True)
class HostRates:
    """Constants from which the predicted parts (terms) of the host memory of one process are computed: bytes of host
    memory, and the fractions `gpu_kept`, `described_kept` and `cpu_kept`. If the description of a field quotes a
    command of `bytescope`, the value is the peak of the resident memory of this command in its phase "start", in which
    it imports libraries.

    Fields:
        python: Python with jax, numpy and the modules of a command: `report plain_jax.py:rnn`.
        flax: flax and optax: `report tiny cpu` minus `python`.
        trainer: flax, optax, Orbax, tensorstore and the modules of the trainer: `train tiny` minus `python`.
        gpu_plugin: jax's CUDA plugin without NVIDIA's libraries: `report tiny h100` minus `report tiny cpu`.
        gpu_libraries: NVIDIA's libraries, which jax loads before the plugin on a machine with a GPU.
        cudnn: libcudnn_graph.so, which jax loads when it traces attention of cuDNN.
        traced: jax's caches after tracing and lowering an empty program.
        traced_equation: growth of these caches per distinct equation (`ProgramSize.distinct`).
        gpu_compile: peak of XLA:GPU's compiler for an empty program: its code, MLIR's dialects and LLVM's targets.
        gpu_compile_equation, gpu_compile_repeated: growth of this peak per distinct equation, and per equation
            (`ProgramSize.total`). Kernels are compiled once for equal computations, so distinct equations count most.
        gpu_kept: fraction of the compiler's peak that the process keeps after the compile.
        described_compile, described_compile_equation, described_compile_repeated, described_kept: the same for a
            compile without machine code (`devices.machine_code`), for NVIDIA GPUs that are not present.
        cpu_compile, cpu_compile_equation, cpu_compile_repeated, cpu_kept: the same for XLA:CPU, on two cores.
        analysis: Python objects and text of a memory report about an empty program.
        analysis_equation: growth of these objects per equation.
        without_jax: Python with numpy, rich and the modules of a command that does not import jax:
            `report FILE.hlo.pb h100:8`.
        analysis_dump_byte: Python objects of a report on a dump, per byte of the compiled program's HloProto.
    """

    python: int = 180 * MIB
    flax: int = 30 * MIB
    trainer: int = 90 * MIB
    gpu_plugin: int = 75 * MIB
    gpu_libraries: int = 270 * MIB
    cudnn: int = 60 * MIB
    traced: int = 16 * MIB
    traced_equation: int = 65 * KIB
    gpu_compile: int = 107 * MIB
    gpu_compile_equation: int = 615 * KIB
    gpu_compile_repeated: int = 22 * KIB
    gpu_kept: float = 0.92
    described_compile: int = 95 * MIB
    described_compile_equation: int = 450 * KIB
    described_compile_repeated: int = 35 * KIB
    described_kept: float = 0.94
    cpu_compile: int = 52 * MIB
    cpu_compile_equation: int = 743 * KIB
    cpu_compile_repeated: int = 27 * KIB
    cpu_kept: float = 0.35
    analysis: int = 6 * MIB
    analysis_equation: int = 4 * KIB
    without_jax: int = 45 * MIB
    analysis_dump_byte: int = 15

    def replaced(self, measured: Mapping[str, float]) -> HostRates:
        """Returns a copy of these constants with the values in `measured` (name of a field -> value). Raises
        ReportError for an unknown name, and for a value that is not a number or is negative."""
        shipped, values = vars(self), {}
        for name, value in measured.items():
            if name not in shipped:
                fault = f"{name!r:.40} is an unknown constant of host memory"
            elif not is_number(value) or value < 0:
                fault = (
                    f"the constant {name!r} of host memory is {value!r:.40}, but must be a number that is not negative"
                )
            else:
                values[name] = type(shipped[name])(value)
                continue
            raise ReportError(f"{fault}: run bytescope calibrate --host again")
        return dataclasses.replace(self, **values)


RATES = HostRates()
_CURRENT: ContextVar[HostRates] = ContextVar("constants of host memory", default=RATES)


def host_rates() -> HostRates:
    """Returns the constants that the current context uses: the constants that `use_host_rates` has set from the file of
    --rates, if `bytescope calibrate --host` wrote the file; otherwise `RATES`."""
    return _CURRENT.get()


def use_host_rates(measured: Mapping[str, float] | None) -> None:
    """Sets the constants with which the current context predicts host memory. measured: name of a field of `HostRates`
    -> value; fields that are not given keep their value in `RATES`. None restores `RATES`. Raises ReportError if a name
    or a value is not valid."""
    _CURRENT.set(RATES.replaced(measured or {}))


@dataclasses.dataclass(frozen=True)
class ProgramSize:
    """The size of a traced program, which is known before it is compiled.

    Fields:
        distinct: number of different equations of the jaxpr that compute floats. Equations with the same primitive, and
            the same types of operands and results, count once. Equations that only move values do not count.
        total: number of equations as XLA compiles them. The equations of a function that is called twice count twice.
            The body of a loop counts once, or as often as the loop is unrolled. The inside of a Pallas kernel does not
            count.
        uses_cudnn: whether the program contains attention of cuDNN.
    """

    distinct: int
    total: int
    uses_cudnn: bool = False


def program_size(jaxpr: Any) -> ProgramSize:
    """Returns the size of a traced program, given its Jaxpr or ClosedJaxpr."""

    def inner(equation: Any) -> tuple[Any, ...]:
        return () if equation.primitive.name == "pallas_call" else tuple(bodies(equation))

    totals: dict[int, int] = {}

    def count(body: Any) -> int:
        if id(body) not in totals:
            totals[id(body)] = sum(
                1 + max(int(equation.params.get("unroll", 1)), 1) * sum(map(count, inner(equation)))
                for equation in body.eqns
            )
        return totals[id(body)]

    kinds, uses_cudnn = set(), False
    for body in distinct_jaxprs(jaxpr, inner):
        for equation in body.eqns:
            name = equation.primitive.name
            uses_cudnn = uses_cudnn or name.startswith(_CUDNN_ATTENTION)
            results = tuple(str(variable.aval) for variable in equation.outvars)
            # Python's constants have weak types, which begin with "~". XLA folds most of them.
            if name not in _NO_ARITHMETIC and any(result.startswith(("float", "bfloat")) for result in results):
                kinds.add((name, tuple(str(variable.aval) for variable in equation.invars), results))
    return ProgramSize(len(kinds), count(inner_jaxpr(jaxpr)), uses_cudnn)


def start_terms(
    platform: str,
    phases: Iterable[str] = ("start",),
    *,
    trainer: bool = True,
    orbax: bool = True,
    gpu_present: bool = False,
) -> tuple[HostTerm, ...]:
    """Returns the host memory that Python and the imported libraries take in one process: one term (predicted part of
    host memory) per phase, all with the same bytes.

    Args:
        platform: the platform that the process compiles for, such as "cpu" or "cuda".
        phases: keys of `HOST_PHASES`.
        trainer: whether the process imports flax and optax.
        orbax: whether such a process imports Orbax and the modules of the trainer too, as for `train`.
        gpu_present: whether the machine has a GPU of this platform. jax then loads NVIDIA's libraries too.
    """
    rates = host_rates()
    size, parts = rates.python, ["Python and jax"]
    if trainer:
        size, parts = size + (rates.trainer if orbax else rates.flax), [*parts, "the trainer's libraries"]
    if platform in _GPUS:
        size += rates.gpu_plugin + (rates.gpu_libraries if gpu_present else 0)
        parts.append("jax's GPU plugin")
    source = f"{', '.join(parts)}; measured after their import"
    return tuple(HostTerm(phase, LIBRARIES, size, source) for phase in phases)


def compile_terms(
    size: ProgramSize,
    platform: str,
    later: Iterable[str] = (),
    *,
    without_code: bool = False,
) -> tuple[HostTerm, ...]:
    """Returns the predicted parts (terms) of host memory that one process takes to trace, compile and analyze a
    program, in the phases "trace", "compile" and "analyze", and the parts that the process still holds in later phases.
    The host memory of the libraries is not included (`start_terms`).

    Args:
        size: size of the traced program.
        platform: the platform that the program is compiled for, such as "cpu" or "cuda".
        later: the phases after "analyze", keys of `HOST_PHASES`.
        without_code: whether the compiler leaves out machine code, as for NVIDIA GPUs that are not present.
    """
    rates = host_rates()
    if platform == "cpu":
        base, distinct, each = rates.cpu_compile, rates.cpu_compile_equation, rates.cpu_compile_repeated
        share = rates.cpu_kept
    elif without_code:
        base, distinct = rates.described_compile, rates.described_compile_equation
        each, share = rates.described_compile_repeated, rates.described_kept
    else:
        base, distinct, each = rates.gpu_compile, rates.gpu_compile_equation, rates.gpu_compile_repeated
        share = rates.gpu_kept
    compiled = base + distinct * size.distinct + each * size.total
    kept = int(compiled * share)
    traced = rates.traced + rates.traced_equation * size.distinct
    read = rates.analysis + rates.analysis_equation * size.total
    count = f"{size.total:,} equations, {size.distinct:,} distinct"
    later = tuple(dict.fromkeys(("analyze", *later)))
    terms = [HostTerm(phase, TRACED, traced, f"jax's caches, {count}") for phase in ("trace", "compile", *later)]
    if size.uses_cudnn and platform in _GPUS:
        library = "libcudnn_graph.so, loaded to trace attention"
        terms += [HostTerm(phase, CUDNN, rates.cudnn, library) for phase in ("trace", "compile", *later)]
    terms.append(HostTerm("compile", COMPILER, compiled, f"linear model of {count}"))
    terms += [HostTerm(phase, KEPT, kept, "memory that XLA's compiler does not free") for phase in later]
    terms += [HostTerm(phase, ANALYSIS, read, f"records of the report, {count}") for phase in later]
    return tuple(terms)


def dump_terms(size: int, imports_jax: bool) -> tuple[HostTerm, ...]:
    """Returns the predicted parts (terms) of the host memory of a process that reads a compiled program from a dump and
    reports on the program, in the phases "start", "analyze" and "other".

    Args:
        size: bytes of the HloProto in the dump.
        imports_jax: whether the process imports jax, such as for the target "local".
    """
    rates = host_rates()
    libraries = rates.python if imports_jax else rates.without_jax
    source = "Python and jax" if imports_jax else "Python without jax"
    read = size + rates.analysis + rates.analysis_dump_byte * size
    return (
        *(HostTerm(phase, LIBRARIES, libraries, source) for phase in ("start", "analyze", "other")),
        *(HostTerm(phase, ANALYSIS, read, f"{size:,} bytes of the dump") for phase in ("analyze", "other")),
    )


def shared_terms(
    size: ProgramSize,
    platform: str,
    later: Iterable[str] = (),
    *,
    trainer: bool = True,
    orbax: bool = True,
    gpu_present: bool = False,
    without_code: bool = False,
) -> tuple[HostTerm, ...]:
    """Returns the predicted parts (terms) of the host memory of a process that compiles one program: the libraries in
    all phases (`start_terms`), and tracing, compiling and analyzing (`compile_terms`).

    Args:
        size: size of the traced program.
        platform: the platform that the program is compiled for, such as "cpu" or "cuda".
        later: the phases after "analyze", keys of `HOST_PHASES`.
        trainer: whether the process imports flax and optax.
        orbax: whether such a process imports Orbax and the modules of the trainer too, as for `train`.
        gpu_present: whether the machine on which the process will run has a GPU of this platform; jax then loads
            NVIDIA's libraries.
        without_code: whether the compiler leaves out machine code, as for NVIDIA GPUs that are not present.
    """
    later = tuple(later)
    phases = dict.fromkeys(("start", "trace", "compile", "analyze", *later))
    start = start_terms(platform, phases, trainer=trainer, orbax=orbax, gpu_present=gpu_present)
    return (*start, *compile_terms(size, platform, later, without_code=without_code))
