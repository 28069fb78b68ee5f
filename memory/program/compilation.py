"""Whatever a user calls a program, brought to a compilation: a step with its arguments, a stage of jax, an HLO dump.

A step or a `Traced` is compiled for whichever target is asked for (`steps.retarget`). A `Lowered` and a `Compiled`
are for the devices that they were made for; with another target they are refused, since the report would be of
another program than it says.
"""

from __future__ import annotations

import dataclasses
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
from bytescope.memory.errors import ReportError, a_kind
from bytescope.memory.hlo import dumps
from bytescope.memory.hlo.jax_types import CompiledStage, LoweredStage, TracedStage
from bytescope.memory.program import callbacks, retarget, tracing

_PLATFORMS = {"cpu": "the CPU", "gpu": "a GPU (it does not say which)", "tpu": "a TPU (it does not say which)"}
_FAMILIES = {"cuda": "gpu", "rocm": "gpu"}
_CALLED = 'memory.analyze(step, *arguments, target="h200:8")'


def compiled_for(
    program: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Target | str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Compilation, Target | None]:
    """The compilation of a program, and the target that it is judged by.

    Args:
        program: a step, plain or jitted, with `args` and `kwargs` (arrays, ShapeDtypeStructs, pytrees of them); or
            without them a `jax.stages.Traced`, `Lowered` or `Compiled`, a wrapper of one, a serialized HloProto, or
            the path of one.
        target: what to compile for, a Target or its name; None: the devices of the arguments' shardings, else those
            at hand, and none for a proto.
        options: of `jax.jit` for a plain step (`tracing.OPTIONS`).

    Raises ReportError for what is not a program, what cannot be compiled for the target, and damaged files.
    """
    target = _as_target(target)
    if (args or kwargs) and (is_stage(program) or isinstance(program, (str, Path, bytes))):
        raise ReportError(
            f"{a_kind(program)} with arguments: it is a program already, leave them out; or "
            f"give the step with them, {_CALLED}"
        )
    if isinstance(program, Compilation):
        return program, target or (targets.parse("local") if program.local else None)
    if isinstance(program, (str, Path, bytes, bytearray, memoryview)):
        return _dumped(compilation_of(program), target)
    if args or kwargs or (takes_arguments(program) and tracing.takes_none(program)):
        if target is not None and target.is_described:
            target.devices()  # a missing compiler is told before anything is traced
        program = _traced(program, args, kwargs or {}, options or {})
    stage, jaxpr = _stage(program), None
    if _is_traced(stage):
        jaxpr = stage.jaxpr
        check_sizes(jaxpr)
        stage = _lowered(stage, target)
    elif _is_stage(stage) and target is not None:
        _refuse_another(stage, target)
    compilation = compilation_of(stage)
    found = target or _target_of(stage, compilation)
    notes = compilation.notes
    if jaxpr is not None and not compilation.local and (number := callbacks.count(jaxpr)):
        notes += (callbacks.note(number),)
    return dataclasses.replace(compilation, jaxpr=jaxpr, notes=notes), found


def compilation_of(program: Any) -> Compilation:
    """Brings what is compiled already, lowered, or dumped to a Compilation; compiles a Lowered for its own devices.

    Raises ReportError for what is not a program, and for a file that cannot be read.
    """
    if isinstance(program, Compilation):
        return program
    if isinstance(program, (str, Path)):
        return Compilation(**dumps.read(Path(program))._asdict())
    if isinstance(program, (bytes, bytearray, memoryview)):
        return Compilation(proto=dumps.unpacked(bytes(program)))
    if _is_compiled(program):
        return read_compiled(program)
    if _is_lowered(program):
        return compile_lowered(program)
    if hasattr(program, "lower") or callable(program):
        raise ReportError(f"{a_kind(program)} is not a program without its arguments: {_CALLED}")
    raise ReportError(
        f"{a_kind(program)} is not a program: give a step with its arguments, {_CALLED}; a "
        "jax.stages.Traced, Lowered or Compiled; the bytes of an HloProto, or its path"
    )


def takes_arguments(program: Any) -> bool:
    """Whether a program is a step, which `compiled_for` wants arguments with: no stage of jax, which may be called."""
    return callable(program) and not is_stage(program)


def is_stage(program: Any) -> bool:
    """Whether a program is a `jax.stages.Traced`, `Lowered` or `Compiled`, or a wrapper of one."""
    stage = _stage(program)
    return _is_traced(stage) or _is_stage(stage)


def _stage(program: Any) -> Any:
    """jax's own stage inside of the class that Flax or equinox puts around it."""
    inside = (getattr(program, name, None) for name in ("traced", "lowered", "compiled"))
    return next((stage for stage in inside if _is_traced(stage) or _is_stage(stage)), program)


def _dumped(compilation: Compilation, target: Target | None) -> tuple[Compilation, Target | None]:
    """A dump with a note of the platform that it was compiled for; without a target of another, which cannot judge
    it."""
    platform = dumps.platform_of(compilation.proto)
    if not platform:
        return compilation, target
    note = f"an HLO dump, compiled for {_PLATFORMS[platform]}"
    if target is not None and platform != _FAMILIES.get(target.platform, target.platform):
        note += (
            f": {target.name} does not judge it, since its compiler makes another program; name a target of the "
            "dump's kind, or give the step itself"
        )
        target = None
    return dataclasses.replace(compilation, notes=(*compilation.notes, note)), target


def _as_target(target: Any) -> Target | None:
    if target is None or isinstance(target, Target):
        return target
    if isinstance(target, str):
        return targets.parse(target)
    raise ReportError(f'target={target!r:.60}: give a name such as "h200:8", or memory.target of one')


def _is_compiled(program: Any) -> TypeGuard[CompiledStage]:
    return hasattr(program, "runtime_executable") and hasattr(program, "memory_analysis")


def _is_lowered(program: Any) -> TypeGuard[LoweredStage]:
    return hasattr(program, "compile") and hasattr(program, "compiler_ir")


def _is_stage(program: Any) -> bool:
    return _is_compiled(program) or _is_lowered(program)


def _is_traced(program: Any) -> TypeGuard[TracedStage]:
    return hasattr(program, "jaxpr") and hasattr(program, "lower") and hasattr(program, "in_tree")


def _traced(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    if not callable(step):
        raise ReportError(f"{a_kind(step)} with arguments is no step: {_CALLED}")
    return tracing.traced(step, args, kwargs, options)


def _lowered(program: TracedStage, target: Target | None) -> LoweredStage:
    """A Traced lowered: for the target, or for the devices of its arguments."""
    here = target or _target_at(retarget.devices_of(program))
    if here is None:
        return program.lower()
    calls_back = here.is_described and callbacks.count(program.jaxpr) > 0
    if calls_back or (target is not None and retarget.moves(program, target)):
        return retarget.lowered_for(program, here)
    return program.lower()


def _target_at(devices: Sequence[Any]) -> Target | None:
    """The target that described devices are; None for those of this process."""
    return targets.of(devices) if devices and is_described(devices[0]) else None


def _target_of(stage: Any, compilation: Compilation) -> Target | None:
    """What a program that came without a target is judged by: the devices that it was compiled for."""
    if compilation.local:
        return targets.parse("local")
    devices = devices_of(stage)
    return targets.of(devices) if devices else None


def _refuse_another(stage: Any, target: Target) -> None:
    """Raises ReportError for a Lowered or Compiled that is for other devices than the target's."""
    devices = devices_of(stage)
    if not devices:  # nothing tells: taken at the caller's word
        return
    here, same = not is_described(devices[0]), devices[0].device_kind == target.kind
    if targets.platform_of(devices[0]) == target.platform and (here or same) and here != target.is_described:
        return
    made = "compiled" if _is_compiled(stage) else "lowered"
    raise ReportError(
        f"a program that is {made} for {devices[0].device_kind} is not one for {target.name}: give the "
        f'step and its arguments,\n  memory.analyze(step, *arguments, target="{target.name}")\nor what '
        f'jax traced,\n  memory.analyze(jax.jit(step).trace(*arguments), target="{target.name}")'
    )
