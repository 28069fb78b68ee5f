"""Compiles programs and keeps their buffer assignment; no other module of the package makes jax compile.

XLA writes its HloProto (module, buffers, heap trace) only as a dump, and only if it compiles. The dump goes to a
temporary folder, and a copy beside the entry of the persistent cache (`compile_cache`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import platform
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bytescope.memory.devices import compile_cache
from bytescope.memory.devices.compile_cache import Entry
from bytescope.memory.devices.compiler_log import kept_back
from bytescope.memory.devices.signature import Signature, signature_of
from bytescope.memory.errors import ReportError, one_line
from bytescope.memory.hlo.jax_types import CompiledStage, JaxDevice, LoweredStage
from bytescope.memory.jaxprs import bodies, inner_jaxpr
from bytescope.memory.records.report_record import XlaStats

if TYPE_CHECKING:
    from bytescope.memory.hlo.buffers import HloProgram

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "jax-rocm7-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)


class Retry(NamedTuple):
    """A failure of XLA: a part of its error message, the compiler options that avoid it, and a note for the report."""

    error: str
    options: Mapping[str, Any]
    note: str


RETRIES = (
    # Fusions of matrix products with reshapes that no tile divides, in jax 0.10: bf16 attention of length 196.
    Retry(
        "Couldn't find output tile sizes",
        {"xla_gpu_enable_triton_gemm": False},
        "XLA failed to tile a matrix product, so this is compiled with xla_gpu_enable_triton_gemm=False, as the run "
        'may have to be: jax.jit(step, compiler_options={"xla_gpu_enable_triton_gemm": False})',
    ),
)
MAX_BYTES = 2**63 - 1  # XLA counts the bytes of an array in int64; for more, the CPU's compiler aborts the process
# XLA's error messages if a size that XLA computes overflows.
OVERFLOWS = ("overflow in static extent product", "Invalid dimension size")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled program and the compiler's records of its buffers.

    Fields:
        proto: a serialized HloProto with the buffer assignment, b"" if there is none.
        module, assignment: without a proto, the serialized HloModuleProto and BufferAssignmentProto (may be b"").
        compiled: the executable, None if only a proto was given.
        stats: XLA's memory statistics. jaxpr: of the traced program, for checkpoint names.
        signature: the leaves of its arguments and results, None if unknown.
        local: whether it was compiled for devices of this process. notes: on the compilation, for the report.
        versions: package -> version, of the packages that compiled it.
    """

    proto: bytes = b""
    module: bytes = b""
    assignment: bytes = b""
    compiled: CompiledStage | None = None
    stats: XlaStats | None = None
    jaxpr: Any = None
    signature: Signature | None = None
    local: bool = False
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def executable(self) -> CompiledStage:
        """Returns the executable. Raises ReportError if this was read from a proto and there is none."""
        if self.compiled is None:
            raise ReportError("a dump has no executable: give the step with its arguments")
        return self.compiled

    @functools.cached_property
    def program(self) -> HloProgram:
        """Returns the module and its buffers, read once.

        Raises:
          ReportError: the proto is damaged.
        """
        from bytescope.memory.hlo import buffers

        return buffers.read_module(self.module, self.assignment) if self.module else buffers.read(self.proto)


def check_sizes(jaxpr: Any) -> None:
    """Raises ReportError for a traced program with an array of more than `MAX_BYTES`, naming its shape."""
    seen, pending = {}, [inner_jaxpr(jaxpr)]
    while pending:
        inside = pending.pop()
        if id(inside) in seen:
            continue
        seen[id(inside)] = inside
        variables = [*inside.invars, *inside.constvars]
        for equation in inside.eqns:
            variables += equation.outvars
            pending += bodies(equation)
        for variable in variables:
            shape, dtype = getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", None)
            sizes = [size for size in shape if isinstance(size, int)]
            if math.prod(sizes) * getattr(dtype, "itemsize", 1) > MAX_BYTES:
                raise ReportError(
                    f"an array of {' x '.join(map(str, shape))} {dtype} is too large for XLA, which "
                    "counts its bytes in 64 bits: give smaller sizes"
                )


def compile_lowered(
    lowered: LoweredStage,
    *,
    described: bool = False,
    exact: bool = True,
    options: Mapping[str, Any] | None = None,
    jaxpr: Any = None,
    notes: tuple[str, ...] = (),
) -> Compilation:
    """Compiles a `jax.stages.Lowered`; the executable is the one that runs.

    An executable from the persistent cache has no heap trace, so its proto is kept beside the entry. If there is no
    such proto and `exact` is set, the program is compiled again, which replaces the entry; if `exact` is not set,
    lifetimes are derived from the schedule.

    described: the devices are not present; jax's cache cannot return programs for them. options: compiler options, as
    in `Lowered.compile(compiler_options=)`. jaxpr, notes: fields of the Compilation; notes of the compiler come first.
    """
    described = described or any(map(is_described, devices_of(lowered)[:1]))
    signature = signature_of(lowered)
    with contextlib.ExitStack() as settings:
        settings.enter_context(kept_back())
        if described:
            settings.enter_context(_no_cache())
        made = _made(lowered, options or {}, exact and not described)
    module, assignment = (b"", b"") if made.proto else _module_of(made.compiled)
    return Compilation(
        proto=made.proto,
        module=module,
        assignment=assignment,
        compiled=made.compiled,
        stats=made.stats,
        jaxpr=jaxpr,
        signature=signature,
        local=not described,
        notes=made.notes + notes,
        versions=versions(),
    )


def read_compiled(compiled: CompiledStage) -> Compilation:
    """Reads a finished `jax.stages.Compiled`: its module, and on some backends its buffers.

    Raises ReportError for an executable that keeps no module.
    """
    module, assignment = _module_of(compiled)
    return Compilation(
        module=module,
        assignment=assignment,
        compiled=compiled,
        stats=stats_of(compiled),
        local=hasattr(compiled.runtime_executable(), "local_devices"),
        versions=versions(),
    )


def _module_of(compiled: CompiledStage) -> tuple[bytes, bytes]:
    """Returns the serialized HloModuleProto of an executable, and its BufferAssignmentProto or b"".

    Raises ReportError for an executable that keeps no module.
    """
    try:
        modules = compiled.runtime_executable().hlo_modules()
        module = modules[0].as_serialized_hlo_module_proto()
    except Exception as error:  # a runtime without HLO raises errors of its own kinds
        raise ReportError(
            "an executable that does not keep its program: give the Lowered that it was compiled from"
        ) from error
    return module, getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", None) or b""


def stats_of(compiled: CompiledStage) -> XlaStats | None:
    """XLA's memory statistics of an executable, None if the backend has none."""
    try:
        analysis = compiled.memory_analysis()
    except Exception:  # not implemented on some runtimes
        return None
    if analysis is None:
        return None
    return XlaStats(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        host_temp_bytes=getattr(analysis, "host_temp_size_in_bytes", None),
        peak_bytes=getattr(analysis, "peak_memory_in_bytes", None),
        generated_code_bytes=analysis.generated_code_size_in_bytes,
    )


def versions() -> dict[str, str]:
    """Returns package -> version of python and of all packages that decide a program's memory."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@dataclasses.dataclass(frozen=True)
class _CompileResult:
    """The result of one compile: the executable, XLA's proto (b"" if it came from the cache), and the cache entry."""

    compiled: CompiledStage
    proto: bytes = b""
    stats: XlaStats | None = None
    notes: tuple[str, ...] = ()
    entry: Entry | None = None


def _made(lowered: LoweredStage, options: Mapping[str, Any], exact: bool) -> _CompileResult:
    """Compiles a program, or takes it from the cache with its kept proto. If there is no such proto and `exact` is set,
    it is compiled again."""
    program = compile_cache.digest(lowered)
    made = _compile(lowered, options)
    if not made.proto and made.entry is not None:
        kept = made.entry.kept(program, renamed=not exact)
        if kept:
            proto, beside = kept
            stats = XlaStats(**beside["stats"]) if beside["stats"] else None
            return _CompileResult(made.compiled, proto, stats, tuple(beside["notes"]), made.entry)
        if exact:
            with made.entry.absent() as gone:
                made = _compile(lowered, options) if gone else made
    if not made.proto and exact:
        with _no_cache():
            return _compile(lowered, options)
    if made.proto and made.entry is not None:
        stats_json = dataclasses.asdict(made.stats) if made.stats else None
        made.entry.keep(program, made.proto, {"stats": stats_json, "notes": made.notes})
    return made


def _compile(lowered: LoweredStage, options: Mapping[str, Any]) -> _CompileResult:
    """Compiles once, or twice if XLA fails in a way that a flag avoids; the result has no proto if XLA wrote none with
    buffers.

    Raises ReportError if sizes that XLA computes overflow.
    """
    try:
        return _compile_once(lowered, options)
    except Exception as error:  # XLA's own kinds
        if any(words in str(error) for words in OVERFLOWS):
            raise ReportError(
                f"XLA cannot compile arrays of such sizes ({one_line(error)}): give smaller sizes"
            ) from error
        known = next((each for each in RETRIES if each.error in str(error)), None)
        if known is None or set(known.options) & set(options):
            raise
        return _compile_once(lowered, {**options, **known.options}, notes=(known.note,))


def _compile_once(lowered: LoweredStage, options: Mapping[str, Any], notes: tuple[str, ...] = ()) -> _CompileResult:
    folders = tempfile.TemporaryDirectory(prefix="hlo-", ignore_cleanup_errors=True)
    with folders as folder, compile_cache.damaged_entries_removed(), compile_cache.watched() as entries:
        compiled = lowered.compile(compiler_options={**options, "xla_dump_to": folder, "xla_dump_hlo_as_proto": True})
        # Small programs may be compiled on the way; the step's is the largest.
        protos = sorted(Path(folder).glob("*after_optimizations.hlo.pb*"), key=lambda p: p.stat().st_size)
        proto = _proto_with_buffers(protos[-1]) if protos else b""
    return _CompileResult(compiled, proto, stats_of(compiled), notes, entries[-1] if entries else None)


def _proto_with_buffers(path: Path) -> bytes:
    """Returns an HloProto that XLA wrote; b"" if it is truncated or has no buffer assignment."""
    from bytescope.memory.hlo import dumps, wire

    try:
        proto = dumps.unpacked(path.read_bytes())  # gzip if the user's XLA_FLAGS ask for it
        for field, value in wire.fields(proto, (0, len(proto))):
            if field == 3 and not isinstance(value, int) and value[1] > value[0]:
                return proto
    except ReportError:  # a full disk cuts the dump off
        pass
    return b""


def is_described(device: JaxDevice) -> bool:
    """Whether a jax device is compile-only, that is not present. No public API says so; an unknown device counts as
    present."""
    return "CompileOnly" in type(getattr(device, "client", None)).__name__


def devices_of(stage: Any) -> tuple[JaxDevice, ...]:
    """The jax devices of a Lowered or a Compiled; () if it does not say."""
    devices = getattr(getattr(stage, "_lowering", None), "_device_list", None)
    if devices:
        return tuple(devices)
    try:
        return tuple(stage.runtime_executable().local_devices())
    except Exception:  # a Lowered has none; a Compiled for devices that are not here raises kinds of its own
        return ()


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Switches the persistent compilation cache off. jax reads the setting once, so its state is reset."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]  # jax sets its options at run time
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
