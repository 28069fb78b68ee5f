"""Refuses a run whose step does not fit in memory. For its advice, variants of the program are compiled.

The memory savings and the words are in `advice.py`, which compiles nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import NoReturn

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.host.node_memory import free_host_bytes
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.launch.failures import too_big
from bytescope.train.plan import advice
from bytescope.train.plan.remat_auto import with_keys
from bytescope.train.plan.run_memory import loop_overhead
from bytescope.train.program.config_files import flatten
from bytescope.train.program.program import Program, build
from bytescope.train.program.run_command import DEFAULT, Command
from bytescope.train.user_errors import DoesNotFit

# Minimum free host memory to compile variants. With less, the operating system would kill the process before it prints.
COMPILE_BYTES = 2**30


def refuse(
    report: ReportRecord,
    program: Program,
    command: Command,
    tell: Callable[[str], None] = lambda line: None,
    each_s: float = 0.0,
) -> NoReturn:
    """Raises DoesNotFit for a step that needs more memory than a device has, before anything is allocated.

    The error has advice on how to make the step fit. If the program runs in one process and the host has COMPILE_BYTES
    of free memory, changed configs are compiled to find the change of lowest cost that fits. In a run of several
    processes nothing is compiled, because all processes would have to take part.

    Args:
        report: the report of the step.
        program: the program of the step.
        command: the command that started the run. The advised `fit` command is derived from it.
        tell: called with a line of text before each compile.
        each_s: the seconds that compiling the step took.
    """
    levers, tried = advice.open_levers(report), list[advice.TriedLever]()
    devices = list(program.mesh.devices.flat)

    def compiled_bytes(keys: advice.Keys) -> int:
        variant = build(with_keys(program.config, keys), devices)
        compilation = variant.compile_for_report()
        config, loop = flatten(variant.config), loop_overhead(variant)
        return report_of(compilation, target=targets.parse("local"), config=config, loop=loop).predicted_bytes

    in_one_process = len({device.process_index for device in devices}) == 1
    if in_one_process and free_host_bytes() >= COMPILE_BYTES:
        tried = advice.try_levers(report, levers, compiled_bytes, tell, each_s)
    raise DoesNotFit(too_big(report), advice.lines(report, levers, tried, _fit_command(report, command)))


def advice_without_compiling(report: ReportRecord, command: Command) -> list[str]:
    """Returns the advice to print when a device ran out of memory: the memory savings left to try, those with the
    lowest cost in time first.

    Args:
        report: the report of the step.
        command: the command that started the run.
    """
    return advice.lines(report, advice.open_levers(report), [], _fit_command(report, command))


def report_without_compiling(program: Program) -> ReportRecord:
    """Returns a memory report that contains only the config and the devices, and no bytes. It is used if compiling ran
    out of memory."""
    # All processes of a run count all devices, so that they print the same advice.
    target = dataclasses.replace(targets.parse("local"), n_devices=program.mesh.size)
    return ReportRecord(
        0, 0, {}, config=flatten(program.config), target=target.to_json(), limit_bytes=target.limit_bytes
    )


def _fit_command(report: ReportRecord, command: Command) -> str:
    return advice.fit_command(command.config or DEFAULT, "local", command.overrides, report)
