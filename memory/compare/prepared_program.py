"""A program that is ready to be compiled, with facts from its author. `report` and `compare` take such programs.

`measure_program` runs a compiled step on zeros and measures the seconds of an update and the peak memory of a device.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.peak.runtime_overheads import LoopOverhead
from bytescope.memory.program import user_program
from bytescope.memory.program.compilation import compiled_for, trace_step, with_arrays, with_donation_off
from bytescope.memory.records.report_record import Description, Finding, ReportRecord

if TYPE_CHECKING:
    from bytescope.memory.allocators.program_events import ProgramCall
    from bytescope.memory.program.user_program import UserProgram


# Updates before timing starts; then minimum and maximum timed updates, and the approximate seconds of timing.
_WARM_UP, _MIN_UPDATES, _MAX_UPDATES, _SECONDS = 2, 5, 50, 4.0


@dataclasses.dataclass(frozen=True)
class RunPrograms:
    """The programs of a run except the training step.

    Attributes:
        peaks: name of a program -> its peak bytes on one device, with the training state.
        calls: returns the programs of a short run, each with its number of calls, from the report of the step.
    """

    peaks: Mapping[str, int]
    calls: Callable[[ReportRecord], Sequence[tuple[ProgramCall, int]]]


@dataclasses.dataclass(frozen=True)
class PreparedProgram:
    """A program that is ready to be compiled, and what its trainer knows about it. Only `compile` is required.

    Fields:
        compile: compiles the program. Returns the compilation, and the target whose memory limit applies (None if no
            limit applies). An optional argument has compiler options, flag of XLA -> value, to compile with instead of
            the program's own. The program is traced only once if it is compiled several times.
        name: the name of the program in error messages.
        config: a mapping that is stored in the report unchanged.
        facts: the trainer's description of the step, which the report's formulas and findings use; None if unknown.
        roles: (regular expression, role) pairs. An argument whose pytree path matches gets the role, such as
            "optimizer".
        names: the checkpoint names of the program.
        loop: memory that the training loop holds on a device in addition to the program's arguments.
        calls_per_update: calls of the step per optimizer update.
        tokens_per_update: tokens per optimizer update, over all devices; None if unknown.
        model_flops: converts the FLOPs counted in one call of the step to the model FLOPs of the call.
        settled: settings that the program derived from its config, as JSON values. They are stored in the comparison.
        batch, policy: texts that describe the batch of an update, and the residuals that layers keep for the backward
            pass.
        choices: settings that the program chose for its devices, with reasons, one setting per line.
        trace: traces the program and returns it, as `compiled_for` takes it without arguments. None if only the
            compiled program exists.
        notes: sentences about the program for its report, such as what an adapter replaced in it.
        findings: returns the findings of the program's report, with remedies in the trainer's keys.
        describe: returns the description of the program for its report, from the model FLOPs of one call of the step
            over all devices. None leaves the description empty.
        complete: adds to a report what only the program's author knows, such as host memory and remedies. It takes the
            report and the jaxpr of the step.
        run_programs: compiles the other programs of a run. None if there are none.
        measure: runs the compiled program on this machine's devices. Returns {"step_seconds": median seconds of one
            update, "tokens_per_s", "peak_bytes"}. None if the program cannot be run.
    """

    compile: Callable[..., tuple[Compilation, Target | None]]
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
    trace: Callable[[], Any] | None = None
    notes: Sequence[str] = ()
    findings: Callable[[ReportRecord], Sequence[Finding]] = lambda report: report.findings
    describe: Callable[[int], Description] | None = None
    complete: Callable[[ReportRecord, Any], ReportRecord] = lambda report, jaxpr: report
    run_programs: Callable[[], RunPrograms] | None = None

    def report_of(self, compilation: Compilation, target: Target | None, **options: Any) -> ReportRecord:
        """Returns the memory report of this program, compiled, with what its trainer knows about it.

        target: the devices whose memory limit applies. options: other arguments of `memory.analysis.report_of`.
        """
        from bytescope.memory.analysis import report_of

        return report_of(
            compilation,
            target=target,
            config=self.config,
            facts=self.facts,
            roles=self.roles,
            names=self.names,
            loop=self.loop,
            **options,
        )

    measure: Callable[[Compilation], Mapping[str, float | None]] | None = None


def prepare(program: UserProgram, target: Target | str) -> PreparedProgram:
    """Prepares a program, as returned by a user's function, for compiling.

    target: a Target to compile for, or its name. If it is "local" and the program has a `target` option, the option is
    used.

    Raises ReportError if the program's `tokens` is not a positive integer.
    """
    options = dict(program.options)
    own = {key: options.pop(key, None) for key in user_program.OWN_OPTIONS}
    tokens = own["tokens"]
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ReportError(
            f"{program.name} returns tokens={tokens!r}, which is not a number of tokens: "
            "return the tokens per update, an int of 1 or more"
        )
    is_local = (target if isinstance(target, str) else target.name) == "local"
    chosen = own["target"] if is_local else target

    traced: list[Any] = []  # the step, traced at the first compile

    def trace_program() -> Any:
        with user_program.one_line_errors(f"{program.name}: the step cannot be compiled"):
            if not traced:
                traced.append(trace_step(program.program, program.args, own["kwargs"], target=chosen, options=options))
            return traced[0]

    def compile_program(flags: Mapping[str, Any] | None = None) -> tuple[Compilation, Target | None]:
        step = trace_program()
        with user_program.one_line_errors(f"{program.name}: the step cannot be compiled"):
            compiler_options = {**(own["compiler_options"] or {}), **(flags or {})}
            compilation, judged = compiled_for(step, target=chosen, compiler_options=compiler_options)
            compilation = with_arrays(compilation, program.args, own["kwargs"] or {})
            return with_donation_off(compilation, program.program, options, step), judged

    def measure(compilation: Compilation) -> Mapping[str, float | None]:
        return measure_program(compilation, tokens)

    return PreparedProgram(
        compile_program,
        name=program.name,
        config=own["config"],
        facts=own["facts"],
        roles=own["roles"] or (),
        names=own["names"] or (),
        tokens_per_update=tokens,
        trace=trace_program,
        measure=measure,
    )


def prepare_dump(path: Any, target: Target) -> PreparedProgram:
    """Prepares a program that XLA has already compiled and dumped to a file, so that a report can be made of it.

    path: the dump file, or the folder of a dump. target: the devices whose memory limit applies.
    """
    return PreparedProgram(lambda: compiled_for(path, target=target))


def time_updates(update: Callable[[], float], devices: Iterable[Any], tokens: int | None) -> dict[str, float | None]:
    """Runs and times optimizer updates. Returns {"step_seconds": the median seconds of one update, "tokens_per_s": over
    all devices, "peak_bytes": the maximum over the devices}.

    Args:
        update: runs one update to its end and returns its seconds.
        devices: the devices that the updates use. The peak is None if their backend does not report it.
        tokens: tokens per update, over all devices; if None, tokens/s is None.
    """
    times: list[float] = []
    for number in range(_WARM_UP + _MAX_UPDATES):
        seconds = update()
        if number >= _WARM_UP:
            times.append(seconds)
        if len(times) >= _MIN_UPDATES and sum(times) >= _SECONDS:
            break
    median = statistics.median(times)
    stats_by_device = [device.memory_stats() or {} for device in devices]
    peaks = [stats["peak_bytes_in_use"] for stats in stats_by_device if "peak_bytes_in_use" in stats]
    return {
        "step_seconds": median,
        "tokens_per_s": tokens / median if tokens else None,
        "peak_bytes": max(peaks, default=None),
    }


def measure_program(compilation: Compilation, tokens: int | None) -> dict[str, float | None]:
    """Runs and times the step of a user's program, called with zeros as arguments. Returns {"step_seconds",
    "tokens_per_s", "peak_bytes"}, as `time_updates` does.

    Donated arguments are created again before each call; this time is not counted.

    compilation: the compiled step. tokens: tokens per update, None if unknown. Raises ReportError for a program without
    an executable.
    """
    import jax
    import jax.numpy as jnp

    compiled = compilation.compiled
    if compiled is None:
        raise ReportError(
            "--measure cannot run the program, because it has no executable for this machine: leave out --measure"
        )
    infos, tree = jax.tree.flatten(compiled.args_info)
    places = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda node: node is None)  # None: an unused argument

    def make_zeros(info: Any, place: Any) -> Callable[[], Any]:
        if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
            return lambda: jax.device_put(jnp.broadcast_to(jax.random.key(0), info.shape), place)
        return jax.jit(lambda: jnp.zeros(info.shape, info.dtype), out_shardings=place)

    zeros = [make_zeros(info, place) for info, place in zip(infos, places)]  # compiled once per argument
    arrays = [make() for make in zeros]

    def update() -> float:
        for number, info in enumerate(infos):
            if info.donated:
                arrays[number] = zeros[number]()
        jax.block_until_ready(arrays)
        args, kwargs = jax.tree.unflatten(tree, arrays)
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args, **kwargs))
        return time.perf_counter() - began

    return time_updates(update, jax.local_devices(), tokens)
