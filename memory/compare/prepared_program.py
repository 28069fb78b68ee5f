"""A program that is ready to be compiled, with what its author knows of it: what `report` and `compare` are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.peak.runtime_overheads import LoopOverhead
from bytescope.memory.program import user_program
from bytescope.memory.program.compilation import compiled_for

if TYPE_CHECKING:
    from bytescope.memory.program.user_program import UserProgram


@dataclasses.dataclass(frozen=True)
class PreparedProgram:
    """One program. Every field but the first has a default, so that a trainer gives what it knows.

    Fields:
        compile: compiles it; returns the compilation, and the target that it is judged by, None for none.
        name: what messages call it.
        config, roles, names: as `memory.analyze` takes them.
        facts: what the trainer knows of the step, for the formulas and findings of its report; None: nothing.
        loop: what the training loop keeps on a device besides the program's arguments.
        calls_per_update: calls of the step per optimizer update. tokens_per_update: tokens of an update, over all
            devices; None where that is not known.
        model_flops: FLOPs that were counted in one call of the step -> model FLOPs of that call.
        settled: what the program made of its config, as JSON values; it is kept with the row.
        batch, policy: what an update is made of, and what the layers keep for the backward pass, in words.
        choices: what the program chose for its devices, and why, one choice per line.
        measure: runs the compilation on this machine's devices; returns `Row.measured`. None: no run is possible.
    """

    compile: Callable[[], tuple[Compilation, Target | None]]
    name: str = "program"
    config: Any = None
    facts: ModelFacts | None = None
    roles: Any = ()
    names: Collection[str] = ()
    loop: LoopOverhead = dataclasses.field(default_factory=LoopOverhead)
    calls_per_update: int = 1
    tokens_per_update: int | None = None
    model_flops: Callable[[float], float] = lambda counted: counted
    settled: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch: str = ""
    policy: str = ""
    choices: str = ""
    measure: Callable[[Compilation], Mapping[str, float | None]] | None = None


def prepare(program: UserProgram, target: Target | str) -> PreparedProgram:
    """Prepares what a function of the user's returned.

    target: what to compile for, a Target or its name; "local" leaves the choice to the program's own `target`.

    Raises ReportError for tokens that are no positive whole number.
    """
    options = dict(program.options)
    own = {key: options.pop(key, None) for key in user_program.OWN_OPTIONS}
    tokens = own["tokens"]
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ReportError(f"{program.name} returns tokens={tokens!r}: give the tokens of an update, 1 or more")
    is_local = (target if isinstance(target, str) else target.name) == "local"
    chosen = own["target"] if is_local else target

    def compile_program() -> tuple[Compilation, Target | None]:
        with user_program.one_line_errors(f"{program.name}: the step cannot be compiled"):  # the first trace
            return compiled_for(program.program, program.args, own["kwargs"], target=chosen, options=options)

    def measure(compilation: Compilation) -> Mapping[str, float | None]:
        from bytescope.memory.compare.measured_steps import measure_program

        return measure_program(compilation, tokens)

    return PreparedProgram(
        compile_program,
        name=program.name,
        config=own["config"],
        facts=own["facts"],
        roles=own["roles"] or (),
        names=own["names"] or (),
        tokens_per_update=tokens,
        measure=measure,
    )


def prepare_dump(path: Any, target: Target) -> PreparedProgram:
    """Prepares a program that XLA dumped."""
    return PreparedProgram(lambda: compiled_for(path, target=target))
