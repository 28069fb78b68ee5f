"""Advice for a step that does not fit here: variants with one lever more, compiled; the `fit` command to copy.

The levers and the words are in `advice`; here the variants of a run's own program are compiled.
"""

import dataclasses
from collections.abc import Callable
from typing import NoReturn

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.devices.host_memory import free_host_bytes
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.launch.failures import too_big
from bytescope.train.plan import advice
from bytescope.train.plan.remat_auto import with_keys
from bytescope.train.plan.run_peak import loop_overhead
from bytescope.train.program.config_files import flatten
from bytescope.train.program.program import Program, build
from bytescope.train.program.run_command import DEFAULT, Command
from bytescope.train.user_errors import DoesNotFit

# Minimum host memory to compile variants: with less, the kernel would kill the process before it prints anything.
COMPILE_BYTES = 2**30


def refuse(
    report: ReportRecord,
    program: Program,
    command: Command,
    tell: Callable[[str], None] = lambda line: None,
    each_s: float = 0.0,
) -> NoReturn:
    """Raises DoesNotFit for a step that a device has not the memory for, before anything is allocated.

    The advice includes the cheapest change that fits, found by compiling (train/plan/advice.py), if the
    program runs in one process (several processes must compile together) and the host has COMPILE_BYTES.

    Args:
      command: what the run was started with, for the `fit` command. tell: called with a line before each compile.
      each_s: seconds that compiling the step took.
    """
    found, levers = [], advice.open_levers(report)
    devices = list(program.mesh.devices.flat)

    def bytes_of(keys: advice.Keys) -> int:
        variant = build(with_keys(program.config, dict(keys)), devices)
        return report_of(
            variant.compile_for_report(),
            target=targets.parse("local"),
            config=flatten(variant.config),
            loop=loop_overhead(variant),
        ).predicted_bytes

    if len({device.process_index for device in devices}) == 1 and free_host_bytes() >= COMPILE_BYTES:
        found = advice.tried(report, levers, bytes_of, tell, each_s)
    raise DoesNotFit(too_big(report), advice.lines(report, levers, found, fit(report, command)))


def advice_without_compiling(report: ReportRecord, command: Command) -> list[str]:
    """The advice for a device that ran out of memory: what is left to try, in the order of its cost."""
    return advice.lines(report, advice.open_levers(report), [], fit(report, command))


def before_the_report(program: Program) -> ReportRecord:
    """A report that knows the config and the devices alone, for a compiler that ran out of memory."""
    target = dataclasses.replace(targets.parse("local"), n_devices=program.mesh.size)  # alike in several processes
    return ReportRecord(
        0, 0, {}, config=flatten(program.config), target=target.to_json(), limit_bytes=target.limit_bytes
    )


def fit(report: ReportRecord, command: Command) -> str:
    """The `bytescope fit` for the task of a run, on this machine."""
    return advice.fit_command(command.config or DEFAULT, "local", command.overrides, report)
