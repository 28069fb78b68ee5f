"""Compiles programs and keeps their buffer assignment. All compiles of the package are in this module.

XLA writes its HloProto (module, buffers, heap trace) only as a dump, and only if it really compiles. The dump goes to
a temporary folder. A copy is saved next to the entry in the persistent cache (`compile_cache`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import platform
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory import environment
from bytescope.memory.devices import compile_cache, machine_code, xla_flags
from bytescope.memory.devices.compile_cache import Entry
from bytescope.memory.devices.compiler_log import FullRemat, RematLog, hold_back_log, read_full_remats, read_remat_log
from bytescope.memory.devices.platform import accelerator
from bytescope.memory.devices.signature import Signature, read_signature
from bytescope.memory.errors import ReportError, one_line
from bytescope.memory.hlo.jax_types import CompiledStage, JaxDevice, LoweredStage
from bytescope.memory.hlo.wire import write_field
from bytescope.memory.host.host_ledger import expect
from bytescope.memory.host.host_terms import program_size, shared_terms
from bytescope.memory.host.process_memory import host_phase, release_free_memory
from bytescope.memory.jaxprs import distinct_jaxprs
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


# xla.proto, xla_gpu_memory_limit_slop_factor: its name and its default in debug_options_flags.cc.
SLOP, SLOP_PERCENT = "xla_gpu_memory_limit_slop_factor", 95
# xla.proto, xla_disable_hlo_passes: names of passes that XLA leaves out, separated by commas. jax sets it to REMAT_PASS
# if its setting jax_compiler_enable_remat_pass is False; a compiler option of this name replaces jax's value.
DISABLED_PASSES = "xla_disable_hlo_passes"
REMAT_PASS, SCHEDULER_PASS, COPY_FUSION_PASS = "rematerialization", "latency-hiding-scheduler", "copy_fusion"
# compile_options.proto: CompileOptionsProto.executable_build_options, ExecutableBuildOptionsProto.device_memory_size.
_BUILD_OPTIONS_FIELD, _DEVICE_MEMORY_FIELD = 3, 15


# jax 0.10 fails to fuse a matrix product with a reshape that no tile size divides: bf16 attention of length 196. Such a
# program is compiled again without Triton's matrix products.
NO_TILE, NO_TRITON = "Couldn't find output tile sizes", "xla_gpu_enable_triton_gemm"
NO_TRITON_NOTE = (
    f"XLA failed to tile a matrix product, so this is compiled with {NO_TRITON}=False. The run may need the option "
    f'too: jax.jit(step, compiler_options={{"{NO_TRITON}": False}})'
)
MAX_BYTES = 2**63 - 1  # XLA counts bytes of an array in int64; if they overflow, the CPU compiler aborts the process
# XLA's error messages for an overflow in a size that XLA computes.
OVERFLOWS = ("overflow in static extent product", "Invalid dimension size")


@dataclasses.dataclass(frozen=True)
class MemorySettings:
    """The compiler settings from which XLA:GPU computes the memory that a program may use.

    Fields:
        device_memory_bytes: the bytes that were set for the device's memory; None if XLA takes 80 % of the memory in
            its description of the device.
        slop_percent: the percentage that temporary buffers may use of the memory left by arguments and results
            (`xla_gpu_memory_limit_slop_factor`).
        disabled_passes: names of the compiler passes that were switched off (`xla_disable_hlo_passes`).
    """

    device_memory_bytes: int | None = None
    slop_percent: int = SLOP_PERCENT
    disabled_passes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled program, with the information that the compiler gives about its buffers.

    Fields:
        proto: serialized HloProto with the buffer assignment, b"" if there is none.
        module, assignment: if there is no proto, the serialized HloModuleProto and BufferAssignmentProto; either may be
            b"".
        compiled: the executable, None if only a proto was given.
        stats: XLA's memory statistics.
        jaxpr: the traced program, from which checkpoint names are read.
        signature: names and shapes of the program's arguments and results, None if unknown.
        local: whether the program was compiled for devices of this process.
        notes: notes on the compilation for the report.
        versions: package -> version, for the packages that compiled the program.
        budget: the memory settings with which XLA:GPU compiled; None if unknown.
        options: the compiler options that were given, flag of XLA -> value.
        remat_log: XLA's log line about a rematerialization pass that did not reach its limit; None if there was none.
        full_remats: XLA's log lines about tensors that its partitioner replicates in order to change their sharding.
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
    budget: MemorySettings | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    remat_log: RematLog | None = None
    full_remats: tuple[FullRemat, ...] = ()

    @property
    def executable(self) -> CompiledStage:
        """The executable. Raises ReportError if there is none, because the compilation was read from a proto."""
        if self.compiled is None:
            raise ReportError(
                "an HLO dump cannot be run, because it contains no executable: give the step with its arguments"
            )
        return self.compiled

    @functools.cached_property
    def program(self) -> HloProgram:
        """The HLO module and its buffers, which are parsed at the first access.

        Raises:
            ReportError: the proto is damaged.
        """
        from bytescope.memory.hlo import buffers

        return buffers.read_module(self.module, self.assignment) if self.module else buffers.read(self.proto)


def check_sizes(jaxpr: Any) -> None:
    """Raises ReportError if a traced program contains an array of more than `MAX_BYTES` (2**63 - 1) bytes, because
    XLA's compiler would abort the process.
    """
    for inside in distinct_jaxprs(jaxpr):
        variables = [*inside.invars, *inside.constvars]
        for equation in inside.eqns:
            variables += equation.outvars
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
    exact: bool = True,
    options: Mapping[str, Any] | None = None,
    jaxpr: Any = None,
    notes: tuple[str, ...] = (),
    device_memory_bytes: int | None = None,
) -> Compilation:
    """Compiles a `jax.stages.Lowered`. The result contains the executable and XLA's report about its buffers.

    Args:
        exact: whether the lifetimes of buffers must be XLA's own. An executable from jax's persistent cache lacks them,
            so they are saved next to the cache entry. If they are missing there and `exact` is set, the program is
            compiled again. If `exact` is not set, lifetimes are derived from the schedule.
        options: compiler options, as in `Lowered.compile(compiler_options=)`. Raises ReportError if XLA does not know
            an option or its value.
        jaxpr, notes: fields of the Compilation. Notes of the compiler come first. If the jaxpr is given, the ledger of
            the process's host memory (`host.host_ledger`) gets the terms of this compile.
        device_memory_bytes: bytes of the pool that jax would have on a GPU that is not present. XLA then plans with
            this size, as on a real GPU. None lets XLA plan with 80 % of the device's memory.
    """
    if options and not str(options.get(SLOP, 0)).isdecimal():
        raise ReportError(f"{SLOP}={options[SLOP]} is not valid for XLA: give a whole number")
    devices = devices_of(lowered)
    # jax's cache is not used for devices that are not present, because it cannot load programs for them.
    described = any(map(is_described, devices[:1]))
    leave_out = machine_code.options_without(devices[0]) if described and devices else {}
    if jaxpr is not None and devices:
        terms = shared_terms(
            program_size(jaxpr),
            devices[0].platform,
            ("other",),
            trainer="flax" in sys.modules,
            orbax="orbax.checkpoint" in sys.modules,
            gpu_present=accelerator() == "cuda",
            without_code=bool(leave_out),
        )
        expect(terms)
    signature = read_signature(lowered)
    with contextlib.ExitStack() as settings:
        settings.enter_context(host_phase("compile"))
        log = settings.enter_context(hold_back_log())
        if described or _PASS_DUMPS.get():
            settings.enter_context(_disabled_compilation_cache())
        read_settings = settings.enter_context(_memory_settings(device_memory_bytes if described else None))
        given = _with_trial(options or {})
        if described and devices:
            result = _compile_without_code(lowered, given, leave_out)
        else:
            result = _compile_or_load(lowered, given, exact and not described)
    module, assignment = (b"", b"") if result.proto else _serialize_module_and_buffers(result.compiled)
    return Compilation(
        proto=result.proto,
        module=module,
        assignment=assignment,
        compiled=result.compiled,
        stats=result.stats,
        jaxpr=jaxpr,
        signature=signature,
        local=not described,
        notes=result.notes + notes,
        versions=versions(),
        budget=read_settings(),
        options=dict(options or {}),
        remat_log=read_remat_log(log),
        full_remats=read_full_remats(log),
    )


def read_compiled(compiled: CompiledStage) -> Compilation:
    """Reads the HLO module, and on some backends the buffers, of a `jax.stages.Compiled`.

    Raises ReportError if the executable does not contain its module.
    """
    module, assignment = _serialize_module_and_buffers(compiled)
    return Compilation(
        module=module,
        assignment=assignment,
        compiled=compiled,
        stats=stats_of(compiled),
        local=hasattr(compiled.runtime_executable(), "local_devices"),
        versions=versions(),
    )


def _serialize_module_and_buffers(compiled: CompiledStage) -> tuple[bytes, bytes]:
    try:
        executable: Any = compiled.runtime_executable()
        module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    except Exception as error:  # each runtime without HLO raises different errors
        raise ReportError(
            "this executable does not contain its HLO module: give the jax.stages.Lowered from which it was compiled"
        ) from error
    return module, getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", None) or b""


def stats_of(compiled: CompiledStage) -> XlaStats | None:
    """Returns XLA's memory statistics of an executable; None if the backend does not provide them."""
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
    """Returns package -> version for Python and the packages that affect a program's memory."""
    by_package = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            by_package[package] = metadata.version(package)
    return by_package


@dataclasses.dataclass(frozen=True)
class _CompileResult:
    """A program that was compiled or loaded from jax's compilation cache.

    Fields:
        compiled: the executable.
        proto: the HloProto that XLA wrote, b"" if the executable came from the cache.
        stats: XLA's memory statistics, None if the backend does not provide them.
        notes: notes on the compilation for the report.
        entry: the entry of jax's compilation cache that was looked up, None if there was no look-up.
    """

    compiled: CompiledStage
    proto: bytes = b""
    stats: XlaStats | None = None
    notes: tuple[str, ...] = ()
    entry: Entry | None = None


def _compile_or_load(lowered: LoweredStage, options: Mapping[str, Any], exact: bool) -> _CompileResult:
    """Compiles a program, or loads it from the cache together with its saved HloProto.

    options: compiler options. exact: whether to compile again if the saved proto is missing. If False, the saved proto
    of a program that differs only in names and source lines may be used instead.
    """
    program = compile_cache.digest(lowered)
    result = _compile(lowered, options)
    if not result.proto and result.entry is not None:
        saved = result.entry.load_proto(program, renamed=not exact)
        if saved:
            proto, more = saved
            stats = XlaStats(**more["stats"]) if more["stats"] else None
            return _CompileResult(result.compiled, proto, stats, tuple(more["notes"]), result.entry)
        if exact:
            with result.entry.removed() as is_removed:
                result = _compile(lowered, options) if is_removed else result
    if not result.proto and exact:
        with _disabled_compilation_cache():
            return _compile(lowered, options)
    if result.proto and result.entry is not None:
        stats_json = dataclasses.asdict(result.stats) if result.stats else None
        result.entry.save_proto(program, result.proto, {"stats": stats_json, "notes": result.notes})
    return result


def _compile_without_code(
    lowered: LoweredStage, options: Mapping[str, Any], without_code: Mapping[str, Any]
) -> _CompileResult:
    """Compiles a program for devices that are not present.

    options: compiler options. without_code: further compiler options, which leave out the machine code
    (`machine_code`). If the compile fails, it is repeated without them.
    """
    if not without_code:
        return _compile(lowered, options)
    with contextlib.suppress(Exception):
        return _compile(lowered, {**without_code, **options})
    result = _compile(lowered, options)
    machine_code.remove_kernels(without_code)  # only these options failed, perhaps because the file is damaged
    return result


def _compile(lowered: LoweredStage, options: Mapping[str, Any]) -> _CompileResult:
    try:
        return _compile_once(lowered, options)
    except Exception as error:  # XLA raises several types
        if any(words in str(error) for words in OVERFLOWS):
            raise ReportError(
                f"XLA cannot compile arrays of these sizes ({one_line(error)}): give smaller sizes"
            ) from error
        if refused := xla_flags.refusal(error):
            raise refused from error
        if NO_TILE not in str(error) or NO_TRITON in options:
            raise
        return _compile_once(lowered, {**options, NO_TRITON: False}, notes=(NO_TRITON_NOTE,))


# Folder for dumps of the module after each compiler pass; None if no dumps are requested.
_PASS_DUMPS: contextvars.ContextVar[Path | None] = contextvars.ContextVar("folder of pass dumps", default=None)


@contextlib.contextmanager
def pass_dumps(folder: Path) -> Iterator[None]:
    """Context manager in which XLA writes the module after each compiler pass that changes it to a folder, as files
    *.after_PASS.before_PASS.hlo.pb. A program that is loaded from a cache has no dumps."""
    token = _PASS_DUMPS.set(folder)
    try:
        yield
    finally:
        _PASS_DUMPS.reset(token)


def _compile_once(lowered: LoweredStage, options: Mapping[str, Any], notes: tuple[str, ...] = ()) -> _CompileResult:
    folders = tempfile.TemporaryDirectory(prefix="hlo-", ignore_cleanup_errors=True)
    with folders as folder, compile_cache.record_lookups() as entries:
        passes = _PASS_DUMPS.get()
        every_pass = {"xla_dump_hlo_pass_re": ".*"} if passes else {}
        compiled = lowered.compile(
            compiler_options={**options, "xla_dump_to": folder, "xla_dump_hlo_as_proto": True, **every_pass}
        )
        if passes:
            for path in Path(folder).glob("*.after_*.hlo.pb*"):
                shutil.move(path, passes / path.name)
        # jax may compile small helper programs too; the step is the largest program.
        protos = sorted(Path(folder).glob("*after_optimizations.hlo.pb*"), key=lambda p: p.stat().st_size)
        proto = _read_proto_with_buffers(protos[-1]) if protos else b""
    release_free_memory()
    return _CompileResult(compiled, proto, stats_of(compiled), notes, entries[-1] if entries else None)


def _read_proto_with_buffers(path: Path) -> bytes:
    from bytescope.memory.hlo import dumps, wire

    try:
        proto = dumps.unpacked(path.read_bytes())  # gzip if the user's XLA_FLAGS ask for it
        for field, value in wire.fields(proto, (0, len(proto))):
            # the buffer assignment
            if field == 3 and not isinstance(value, int) and value[1] > value[0]:
                return proto
    except ReportError:  # a full disk cuts the dump off
        pass
    return b""


def is_described(device: JaxDevice) -> bool:
    """Returns whether a jax device is compile-only, which means that the device is not present. An unknown kind of
    device counts as present. jax has no public API for this."""
    return "CompileOnly" in type(getattr(device, "client", None)).__name__


def devices_of(stage: Any) -> tuple[JaxDevice, ...]:
    """Returns the devices of a `jax.stages.Lowered` or `Compiled`; () if they are unknown."""
    devices = getattr(getattr(stage, "_lowering", None), "_device_list", None)
    if devices:
        return tuple(devices)
    try:
        return tuple(stage.runtime_executable().local_devices())
    except Exception:  # a Lowered has no executable, and a Compiled for absent devices raises various errors
        return ()


@dataclasses.dataclass
class _MemoryRequest:
    """The device memory in bytes with which jax shall compile, and the settings with which it last compiled."""

    size: int | None
    settings: MemorySettings | None = None


# Set in the thread that compiles, so that compiles of other threads, and the user's own, are not changed.
_MEMORY_REQUEST: contextvars.ContextVar[_MemoryRequest | None] = contextvars.ContextVar("memory request", default=None)


@contextlib.contextmanager
def _memory_settings(size: int | None) -> Iterator[Callable[[], MemorySettings | None]]:
    """Context manager in which jax compiles with `size` as the bytes of the device's memory. None leaves XLA's default.
    Yields a function that returns the settings of the last compile; None if nothing was compiled.
    """
    _wrap_compile_options()
    request = _MemoryRequest(size)
    token = _MEMORY_REQUEST.set(request)
    try:
        yield lambda: request.settings
    finally:
        _MEMORY_REQUEST.reset(token)


# Compiler options of a trial, which are added to the options of every compile in this thread.
_TRIAL: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar("options of a trial", default=None)


@contextlib.contextmanager
def trial_options(options: Mapping[str, str]) -> Iterator[None]:
    """Context manager in which `compile_lowered` adds compiler options, such as those of a finding's remedy. A name
    that begins with "jax_" is a boolean setting of jax.config instead.

    The option `xla_disable_hlo_passes` is added to the passes that are off already, and does not replace them.
    """
    settings = {name: value == "True" for name, value in options.items() if name.startswith("jax_")}
    token = _TRIAL.set({name: value for name, value in options.items() if name not in settings})
    try:
        with contextlib.ExitStack() as stack:
            for name, value in settings.items():
                stack.enter_context(jax_setting(name, value))
            yield
    finally:
        _TRIAL.reset(token)


def jax_setting(name: str, value: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which a boolean setting of jax.config has a value, for this thread only.

    `jax.config.update` sets the value for all threads. If compiles overlap, the last one to end would leave the value
    of another compile behind, for every later program of the process.
    """
    from jax._src import config  # no public API has the context managers of all settings

    return config.config_states[name](value)


def _with_trial(options: Mapping[str, Any]) -> Mapping[str, Any]:
    trial = dict(_TRIAL.get() or {})
    if DISABLED_PASSES in trial:
        import jax

        passes = [*str(options.get(DISABLED_PASSES, "")).split(","), *trial[DISABLED_PASSES].split(",")]
        enabled = jax.config.jax_compiler_enable_remat_pass  # type: ignore[attr-defined]  # jax adds it at run time
        if not enabled and DISABLED_PASSES not in options:
            passes.append(REMAT_PASS)
        trial[DISABLED_PASSES] = ",".join(dict.fromkeys(filter(None, passes)))
    return {**options, **trial}


@functools.cache
def _wrap_compile_options() -> None:
    """Wraps jax's function that creates compile options, so that it follows the current request for device memory.

    jaxlib sets the size for real GPUs from the limit of the allocator (py_client.cc), and offers no attribute for it;
    but the options' proto has a field. jax has no public hook. Without a request, the wrapper changes nothing.
    """
    from jax._src import compiler

    create = compiler.get_compile_options

    @functools.wraps(create)
    def create_with_memory(*args: Any, **kwargs: Any) -> Any:
        options, request = create(*args, **kwargs), _MEMORY_REQUEST.get()
        if request is None:
            return options
        given = dict(options.env_option_overrides)
        slop = given.get(SLOP)
        disabled = given.get(DISABLED_PASSES, options.executable_build_options.debug_options.xla_disable_hlo_passes)
        passes = tuple(filter(None, str(disabled).split(",")))
        request.settings = MemorySettings(request.size, int(_slop_of_flags() if slop is None else slop), passes)
        if request.size is None:
            return options
        build_options = write_field(_DEVICE_MEMORY_FIELD, request.size)
        proto = options.SerializeAsString() + write_field(_BUILD_OPTIONS_FIELD, build_options)
        return type(options).ParseFromString(proto)

    compiler.get_compile_options = create_with_memory


def _slop_of_flags() -> int:
    """Returns XLA's `xla_gpu_memory_limit_slop_factor`: the percentage of the free memory that a program may use, from
    the environment variable XLA_FLAGS or XLA's default."""
    given = re.findall(rf"--{SLOP}=(\d+)", environment.xla_flags())
    return int(given[-1]) if given else SLOP_PERCENT


# All threads share jax's setting. If several compiles that must not use the cache run at the same time, the first one
# switches it off, and the last one restores it.
_CACHE_LOCK = threading.Lock()
_CACHE_SETTINGS: list[bool] = []  # the user's setting, once for each of these compiles


@contextlib.contextmanager
def _disabled_compilation_cache() -> Iterator[None]:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    def switch(on: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", on)
        # jax reads the setting only once, so its cache state is reset.
        compilation_cache.reset_cache()

    with _CACHE_LOCK:
        enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]  # jax sets its options at run time
        _CACHE_SETTINGS.append(_CACHE_SETTINGS[0] if _CACHE_SETTINGS else enabled)
        switch(False)
    try:
        yield
    finally:
        with _CACHE_LOCK:
            before = _CACHE_SETTINGS.pop()
            if not _CACHE_SETTINGS:
                switch(before)
