"""Compiles a program given in any form: a step with its arguments, a jax stage or an HLO dump.

A step or a `Traced` is compiled for the given target (`retarget`). A `Lowered` or `Compiled` already has devices.
Another target is refused, because the report would describe a different program.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from bytescope.memory.devices import targets
from bytescope.memory.devices.compiler import (
    Compilation,
    check_sizes,
    compile_lowered,
    devices_of,
    is_described,
    read_compiled,
)
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError, type_phrase
from bytescope.memory.hlo import dumps
from bytescope.memory.hlo.jax_types import CompiledStage, LoweredStage, TracedStage
from bytescope.memory.host.host_ledger import expect
from bytescope.memory.host.host_terms import dump_terms
from bytescope.memory.host.process_memory import host_phase
from bytescope.memory.program import callbacks, retarget, tracing

_PLATFORMS = {"cpu": "the CPU", "gpu": "a GPU (it does not say which)", "tpu": "a TPU (it does not say which)"}
_FAMILIES = {"cuda": "gpu", "rocm": "gpu"}
_DUMPS = (str, Path, bytes, bytearray, memoryview)
_CALLED = 'memory.analyze(step, *arguments, target="h200:8")'


def compiled_for(
    program: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Target | str | None = None,
    options: Mapping[str, Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> tuple[Compilation, Target | None]:
    """Compiles a program if needed. Returns its compilation (the compiled program with its HLO), and the target (the
    devices) whose memory limit applies.

    Args:
        program: a step, plain or jitted, with `args` and `kwargs` (arrays, ShapeDtypeStructs, or pytrees of them).
            Without arguments: a `jax.stages.Traced`, `Lowered` or `Compiled`, a wrapper of one, a serialized HloProto,
            or the path of a proto.
        target: a Target or its name. None means the devices in the arguments' shardings, or the available devices if
            there are none. For a proto, None means that there is no target.
        options: options of `jax.jit` for a plain step, such as `donate_argnums` (`tracing.OPTIONS`).
        compiler_options: options of XLA, flag -> value, for a program that is not compiled yet.

    Raises ReportError if XLA does not know a compiler option, if the object is not a program, if it cannot be compiled
    for the target, or if a file is damaged.
    """
    target, step = _as_target(target), program
    program = trace_step(program, args, kwargs, target=target, options=options)
    if compiler_options and (_is_compiled(unwrapped_stage(program)) or isinstance(program, (*_DUMPS, Compilation))):
        raise ReportError(
            f"{type_phrase(program)} is compiled already, so the compiler option {next(iter(compiler_options))} cannot "
            f"be set: leave it out, or give the step with its arguments, {_CALLED}"
        )
    if isinstance(program, Compilation):
        return program, target or (targets.parse("local") if program.local else None)
    if isinstance(program, _DUMPS):
        return _compilation_of_dump(_dump(program), target)
    stage = unwrapped_stage(program)
    if is_traced(stage):
        check_sizes(stage.jaxpr)
        with host_phase("trace"):
            lowered = _lower_for(stage, target)
        number = callbacks.count(stage.jaxpr) if any(map(is_described, devices_of(lowered)[:1])) else 0
        notes = (callbacks.note(number),) if number else ()
        judged = target or _described_target(lowered)
        pool = judged.pool_bytes if judged else None
        compilation = compile_lowered(
            lowered, jaxpr=stage.jaxpr, notes=notes, device_memory_bytes=pool, options=compiler_options or {}
        )
        compilation = with_donation_off(with_arrays(compilation, args, kwargs or {}), step, options or {}, stage)
        return compilation, judged or _target_of(lowered, compilation)
    if target is not None and (_is_compiled(stage) or _is_lowered(stage)):
        _refuse_other_devices(stage, target)
    compilation = _compilation_of(stage, target, compiler_options)
    return compilation, target or _target_of(stage, compilation)


@host_phase("trace")
def trace_step(
    program: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Target | str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Traces a step with its arguments, so that it can be compiled several times. Returns a program that `compiled_for`
    takes without arguments. A program that is no step, such as a jax stage, is returned unchanged.

    The arguments are those of `compiled_for`. Raises ReportError if the step cannot be traced for the target.
    """
    if (args or kwargs) and (is_stage(program) or isinstance(program, (str, Path, bytes))):
        raise ReportError(
            f"{type_phrase(program)} is a program already and takes no arguments: leave the arguments out, or "
            f"give the step with its arguments, {_CALLED}"
        )
    target = _as_target(target)
    if args or kwargs or (takes_arguments(program) and tracing.takes_no_arguments(program)):
        if target is not None and target.is_described:
            target.devices()  # a missing compiler is reported before anything is traced
        if not callable(program):
            raise ReportError(f"{type_phrase(program)} is not a step that takes arguments: give a function, {_CALLED}")
        return tracing.trace(program, args, kwargs or {}, options or {})
    return program


def _as_target(target: Target | str | None) -> Target | None:
    if isinstance(target, str):
        return targets.parse(target)
    if target is not None and not isinstance(target, Target):
        raise ReportError(
            f'target={target!r:.60} is not a target: give a name such as "h200:8", or memory.target("h200:8")'
        )
    return target


def _compilation_of(
    program: Any, target: Target | None = None, compiler_options: Mapping[str, Any] | None = None
) -> Compilation:
    """Returns the Compilation of a `jax.stages.Compiled` or `Lowered`. A Lowered is compiled for its own devices.

    `target`: the devices that the compilation is for, if they are known. `compiler_options`: options of XLA for a
    Lowered, flag -> value.

    Raises ReportError if the object is not a program, or if a file cannot be read.
    """
    if _is_compiled(program):
        return read_compiled(program)
    if _is_lowered(program):
        described = target or _described_target(program)
        pool = described.pool_bytes if described else None
        return compile_lowered(program, device_memory_bytes=pool, options=compiler_options or {})
    if hasattr(program, "lower") or callable(program):
        raise ReportError(f"{type_phrase(program)} cannot be compiled without its arguments: give them, {_CALLED}")
    raise ReportError(
        f"{type_phrase(program)} is not a program: give a step with its arguments, {_CALLED}; a "
        "jax.stages.Traced, Lowered or Compiled; the bytes of an HloProto, or its path"
    )


def with_arrays(compilation: Compilation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compilation:
    """Returns a compilation whose signature says on how many devices each argument is before the call. Arguments that
    are given as shapes are on none.

    args, kwargs: the arguments with which the step was traced. If their arrays do not match the signature, the
    compilation is returned unchanged.
    """
    import jax

    signature = compilation.signature
    arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    if signature is None or [tuple(a.shape) for a in arrays] != [leaf.shape for leaf in signature.arguments]:
        return compilation
    leaves = []
    for array, leaf in zip(arrays, signature.arguments):
        held = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and not array.is_deleted()
        if held and array.size:
            leaf = dataclasses.replace(leaf, devices=len(array.sharding.device_set))
        leaves.append(leaf)
    return dataclasses.replace(compilation, signature=dataclasses.replace(signature, arguments=tuple(leaves)))


def with_donation_off(compilation: Compilation, step: Any, options: Mapping[str, Any], program: Any) -> Compilation:
    """Returns a compilation whose signature says which arguments a step asks to donate although a setting of jax
    switches donation off.

    Args:
        step, options: the step and the options of `jax.jit` with which it was traced.
        program: the `jax.stages.Traced` of the step, or a wrapper of one.
    """
    signature, traced = compilation.signature, unwrapped_stage(program)
    off = tracing.donation_switched_off(step, options, traced) if is_traced(traced) else ()
    if signature is None or len(off) != len(signature.arguments):
        return compilation
    leaves = [dataclasses.replace(leaf, donation_off=flag) for leaf, flag in zip(signature.arguments, off)]
    return dataclasses.replace(compilation, signature=dataclasses.replace(signature, arguments=tuple(leaves)))


def takes_arguments(program: Any) -> bool:
    """Returns whether `compiled_for` needs the program's arguments. True for functions, False for jax stages, even if
    they are callable."""
    return callable(program) and not is_stage(program)


def is_stage(program: Any) -> bool:
    """Returns whether a program is a `jax.stages.Traced`, `Lowered` or `Compiled`, or a wrapper of one."""
    stage = unwrapped_stage(program)
    return is_traced(stage) or _is_lowered(stage) or _is_compiled(stage)


def unwrapped_stage(program: Any) -> Any:
    """Returns the stage of jax inside an object of flax or equinox that wraps it. Other programs are returned
    unchanged."""
    for name in ("traced", "lowered", "compiled"):
        stage = getattr(program, name, None)
        if is_traced(stage) or _is_lowered(stage) or _is_compiled(stage):
            return stage
    return program


def _dump(program: str | Path | bytes | bytearray | memoryview) -> dumps.Dump:
    if isinstance(program, (str, Path)):
        return dumps.read(Path(program))
    return dumps.Dump(dumps.unpacked(bytes(program)))


def _compilation_of_dump(dump: dumps.Dump, target: Target | None) -> tuple[Compilation, Target | None]:
    expect(dump_terms(len(dump.proto), imports_jax="jax" in sys.modules))
    platform = dumps.platform_of(dump.proto)
    if not platform:
        return Compilation(proto=dump.proto, notes=dump.notes), target
    note = f"an HLO dump, compiled for {_PLATFORMS[platform]}"
    if target is not None and platform != _FAMILIES.get(target.platform, target.platform):
        note += (
            f": not compared with {target.name}, whose compiler would make a different program; give a target of the "
            "dump's platform, or the step itself"
        )
        target = None
    return Compilation(proto=dump.proto, notes=(*dump.notes, note)), target


def _is_compiled(program: Any) -> TypeGuard[CompiledStage]:
    return hasattr(program, "runtime_executable") and hasattr(program, "memory_analysis")


def _is_lowered(program: Any) -> TypeGuard[LoweredStage]:
    return hasattr(program, "compile") and hasattr(program, "compiler_ir")


def is_traced(program: Any) -> TypeGuard[TracedStage]:
    """Returns whether a program is a `jax.stages.Traced`."""
    return hasattr(program, "jaxpr") and hasattr(program, "lower") and hasattr(program, "in_tree")


def _lower_for(program: TracedStage, target: Target | None) -> LoweredStage:
    devices, asked = retarget.devices_of(program), target
    if target is None and devices and is_described(devices[0]):
        target = targets.from_devices(devices)
    if target is None:
        return program.lower()
    calls_back = target.is_described and callbacks.count(program.jaxpr) > 0
    if calls_back or (asked is not None and retarget.moves(program, asked)):
        return retarget.lowered_for(program, target)
    return program.lower()


def _target_of(stage: Any, compilation: Compilation) -> Target | None:
    if compilation.local:
        return targets.parse("local")
    devices = devices_of(stage)
    return targets.from_devices(devices) if devices else None


def _described_target(stage: Any) -> Target | None:
    """Returns the target of the compile-only devices (devices that this machine does not have) for which a program was
    lowered; None for other devices.
    """
    devices = devices_of(stage)
    return targets.from_devices(devices) if devices and is_described(devices[0]) else None


def _refuse_other_devices(stage: Any, target: Target) -> None:
    devices = devices_of(stage)
    if not devices:  # unknown devices are assumed to be the target's
        return
    is_present, same_kind = not is_described(devices[0]), devices[0].device_kind == target.kind
    same_platform = targets.platform_of(devices[0]) == target.platform
    if same_platform and (is_present or same_kind) and is_present != target.is_described:
        return
    verb = "compiled" if _is_compiled(stage) else "lowered"
    raise ReportError(
        f"a program that is {verb} for {devices[0].device_kind} cannot be analyzed for {target.name}: give the "
        f'step and its arguments,\n  memory.analyze(step, *arguments, target="{target.name}")\nor the '
        f'traced step,\n  memory.analyze(jax.jit(step).trace(*arguments), target="{target.name}")'
    )
