"""bytescope audit: compares what a config's step, or any program, asks jax and XLA to do with what XLA compiles.

This module audits bytescope's own configs. `memory.commands.audit_command` audits all other programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.commands import audit_command, audit_fix, report_command
from bytescope.memory.commands.arguments import add_settings, check_files, refuse_flags
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.errors import ReportError
from bytescope.memory.fixes import equal_results
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.view.console import put
from bytescope.memory.view.text_layout import Prose
from bytescope.train.commands.config_arguments import add_subject, check_program, with_xla
from bytescope.train.launch.runtime import TRAIN_FRACTION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope audit` to the parser."""
    add_subject(parser)
    add_settings(parser)
    report_command.add_program(parser)
    audit_command.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope audit`: compiles the program, prints what it asks jax and XLA to do (recompute, save, offload,
    donate, keep sharded) and whether XLA does it, tries the changes of --fix, and writes the files of --json and
    --html. Returns the exit code: 1 with --strict if a request was not honored, else 0.

    Raises ReportError for flags that cannot be combined, and for a program that cannot be compiled.
    """
    check_files(args)
    if is_adapted(args.config):
        refuse_flags(args, ("fix", "fix_sharding", "small", "write"))
        return audit_command.run(args)
    check_program(args)
    audit_fix.check_fix(args)
    if not args.config:
        return audit_command.run(args)
    for flag in ("write", "fix_sharding"):
        if getattr(args, flag):
            raise ReportError(
                f"--{flag.replace('_', '-')} is only valid with --program, because a config is changed by flags of "
                "bytescope train: leave it out"
            )
    return _audit_config(args)


def _audit_config(args: argparse.Namespace) -> int:
    from bytescope.memory.devices import targets
    from bytescope.train.commands.report_config import with_tried_remedies
    from bytescope.train.plan.config_factory import build_program, prepare_program, subject_of
    from bytescope.train.plan.report_remedies import with_remedies
    from bytescope.train.program import config_files as configs

    args.overrides = with_xla(args, args.overrides)
    report_command.start_platform(args, TRAIN_FRACTION.value)
    target = targets.parse(args.target, TRAIN_FRACTION)
    if args.small:  # an unknown key is an error before anything is compiled
        configs.load(args.config, [*args.overrides, *equal_results.parse_small(args.small).items()])
    program = build_program(args.config, args.overrides, target)
    prepared = prepare_program(program, target, configs.load_flat(args.config, args.overrides))
    subject = functools.partial(subject_of, args.config, args.overrides, prepared)
    report = audit_command.make_audited_report(args, prepared, subject)[0]
    audit_command.show(report)
    tried = []
    if args.fix:
        report = with_tried_remedies(args, target, prepared, with_remedies(report))
        tried = tried_flags(report)
        if args.small:
            tried = with_small_runs(tried, args.config, args.overrides, args.small, target.n_devices)
        audit_fix.show(tried)
    return audit_command.finish(args, report, tried)


def with_small_runs(
    tried: Sequence[audit_fix.TriedProposal], name: str, overrides: Sequence[tuple[str, str]], small: str, devices: int
) -> list[audit_fix.TriedProposal]:
    """Runs a config and each change of it at small sizes on the CPU, and compares the losses, gradients and new states.
    Returns the changes with the results of the comparisons. A change with no flags of `bytescope train`, or with keys
    that cannot be compared, stays "not checked". Compiler options (the keys `xla.*`) are left out of all runs, because
    they belong to the devices of the target.

    Args:
        tried: the changes, with flags of `bytescope train`.
        name: name of the config.
        overrides: pairs (dotted key, value as text) of the command line.
        small: the value of --small, `KEY=VALUE,...`; its values replace the values of the command line.
        devices: number of simulated CPU devices.
    """
    from bytescope.train.plan.config_factory import FACTORY
    from bytescope.train.plan.open_levers import parse_flags

    sizes = equal_results.parse_small(small)
    runs: dict[str, equal_results.SmallRun] = {}

    def run_with(flags: str) -> equal_results.SmallRun:
        if flags not in runs:
            put(Prose(" ".join(filter(None, (f"running the config with {small} on the CPU", flags))), "dim"))
            pairs = {CONFIG: name, **dict(overrides), **dict(parse_flags(flags)), **sizes}
            kept = {key: text for key, text in pairs.items() if not key.startswith("xla.")}
            runs[flags] = equal_results.run_version(FACTORY.reference, kept, devices=devices)
        return runs[flags]

    rows = []
    for row in tried:
        flags = row.proposal.flags
        keys = {key for key, _ in parse_flags(flags)} if flags.startswith("--config.") else set()
        taken = sorted(keys & sizes.keys())
        if keys and row.after is not None:
            try:
                if taken:
                    raise ReportError(f"--small also sets {', '.join(taken)}: leave {', '.join(taken)} out of --small")
                if all(key.startswith("xla.") for key in keys):
                    raise ReportError("compiler options of the target do not apply to the CPU")
                equality = equal_results.compare_results(run_with(""), run_with(flags))
                row = dataclasses.replace(row, numerics=equality.outcome, comparison=equality.sentence)
            except ReportError as error:
                row = dataclasses.replace(row, comparison=f"the results are not compared: {error}")
        rows.append(row)
    return rows


def tried_flags(report: ReportRecord) -> list[audit_fix.TriedProposal]:
    """Returns the remedies of a report's findings, such as flags of `bytescope train`, as proposed changes. If the
    report has the bytes and seconds of the program with a remedy, because this program was compiled before, they are
    copied to the row of the remedy."""
    rows = []
    for finding in report.findings:
        changes = finding.flags or finding.options
        proposal = audit_fix.Proposal(finding.kind, f"{finding.message}: {changes or finding.remedy}", flags=changes)
        seconds = report.prediction.get("seconds")
        rows.append(
            audit_fix.TriedProposal(
                proposal, report.allocated_bytes, finding.tried_bytes, seconds, finding.tried_seconds
            )
        )
    return rows
