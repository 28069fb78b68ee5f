"""bytescope audit --fix: proposes changes for the problems in a report, compiles them, and prints them as a patch.

Also defines the flag --fix-sharding, which `audit_sharding.py` runs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.fixes import equal_results, patched_program
from bytescope.memory.fixes.equal_results import NOT_CHECKED, SmallRun
from bytescope.memory.fixes.proposals import Proposal, propose
from bytescope.memory.fixes.source_edits import unified_diff
from bytescope.memory.jaxprs import checkpoint_names_in
from bytescope.memory.program import user_program
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.view.console import put
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.text_layout import Prose


@dataclasses.dataclass(frozen=True)
class TriedProposal:
    """A proposed change, and the results of compiling and running the changed program. Sizes are bytes on one device.

    Fields:
        proposal: the proposed change.
        before, after: allocated bytes without and with the change; `after` is None if the changed program was not
            compiled.
        seconds_before, seconds_after: predicted seconds of one optimizer update without and with the change; None if
            unknown.
        not_honored: number of requests (audit rows) of the changed program that XLA does not honor; None if the changed
            program was not compiled.
        numerics: "equal" or "differs" for the results of the changed and the unchanged program at small sizes; "not
            checked" if they were not run.
        comparison: one sentence about the comparison of the results, or about why it failed; "" if the programs were
            not run.
        error: why the changed program could not be compiled; "" if it was compiled, or if the change must be made by
            hand.
    """

    proposal: Proposal
    before: int
    after: int | None = None
    seconds_before: float | None = None
    seconds_after: float | None = None
    not_honored: int | None = None
    numerics: str = NOT_CHECKED
    comparison: str = ""
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the proposal as a dict of JSON values, with bytes on one device and seconds. `files` lists the
        paths of the changed files; [] if the change must be made by hand."""
        return {
            "kind": self.proposal.kind,
            "words": self.proposal.words,
            "flags": self.proposal.flags,
            "place": self.proposal.place,
            "files": [str(path) for path in self.proposal.changed],
            "allocated_bytes_before": self.before,
            "allocated_bytes_after": self.after,
            "seconds_before": self.seconds_before,
            "seconds_after": self.seconds_after,
            "not_honored": self.not_honored,
            "numerics": self.numerics,
            "comparison": self.comparison,
            "error": self.error,
        }


def _outcome(row: TriedProposal) -> str:
    if row.error:
        return "failed"
    return "by hand" if row.after is None else "compiled"


COLUMNS = (
    ColumnView("kind", "change for", "name", read=lambda row: row.proposal.kind),
    ColumnView("outcome", "change", "text", read=_outcome),
    ColumnView("before", "before", "bytes"),
    ColumnView("after", "after", "bytes"),
    ColumnView("seconds_before", "before", "duration", skip_zero=True),
    ColumnView("seconds_after", "after", "duration", skip_zero=True),
    ColumnView("numerics", "results at small sizes", "text", short="results"),
)


def add_fix(parser: argparse.ArgumentParser) -> None:
    """Adds the flags --fix, --fix-sharding, --small and --write of `bytescope audit` to the parser."""
    parser.add_argument(
        "--fix",
        action="store_true",
        help="propose a change for each finding and for each request that XLA does not honor, compile the program with "
        "each change, and print the bytes before and after and the changes as a patch",
    )
    parser.add_argument(
        "--fix-sharding",
        action="store_true",
        help="compile the program with different sharding constraints on the arrays that XLA gathers in full on every "
        "device, and rank the constraints by bytes and seconds",
    )
    parser.add_argument(
        "--small",
        metavar="KEY=VALUE,...",
        help="with --fix or --fix-sharding: values that make the program small, such as the keyword arguments "
        "layers=2,width=64 of the --program function, or the keys model.n_layers=2,data.seq_len=64 of a config; the "
        "changed and the unchanged program then run on the CPU at this size, and their results are compared",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="with --fix: write the changes to the source files (default: only print them)",
    )


def check_fix(args: argparse.Namespace) -> None:
    """Checks the flags --fix, --fix-sharding, --small, --write and --passes before anything is compiled.

    Raises ReportError if --small or --write is given without the flag that it belongs to, if --fix, --fix-sharding or
    --passes is given for an HLO dump, or if the value of --small cannot be parsed.
    """
    fixes = [flag for flag in ("fix", "fix_sharding") if getattr(args, flag)]
    for flag in ("small", "write"):
        if getattr(args, flag) and not (args.fix or (flag == "small" and args.fix_sharding)):
            raise ReportError(f"--{flag} is only valid with --fix: add --fix, or leave out --{flag}")
    if fixes and args.hlo:
        raise ReportError(
            f"--{fixes[0].replace('_', '-')} cannot be used with --hlo, because an HLO dump has no source files: give "
            "the step with --program=MODULE:FUNCTION instead of --hlo"
        )
    if args.passes and args.hlo:
        raise ReportError(
            "--passes cannot be used with --hlo, because an HLO dump is already compiled: give the step with "
            "--program=MODULE:FUNCTION instead of --hlo"
        )
    if args.small:
        equal_results.parse_small(args.small)


def fix_program(args: argparse.Namespace, report: ReportRecord, jaxpr: Any) -> list[TriedProposal]:
    """Proposes changes to the source files of the --program function, compiles the program with each change, and prints
    the results. With --small, also compares the results of the changed and the unchanged program at small sizes. With
    --write, writes the changes to the files. Returns the proposals with their results.

    Args:
        args: the parsed command line.
        report: the report of the unchanged program.
        jaxpr: the ClosedJaxpr of the unchanged program.
    """
    function = user_program.load_function(args.program)
    step = function.make(target=None).program
    words = [f"--program={args.program}", args.target, *(f"--xla={flag}" for flag in args.xla)]
    proposals = propose(report, function, step, checkpoint_names_in(jaxpr))
    unchanged = None
    if args.small and any(proposal.changed for proposal in proposals):
        put(Prose(f"running the unchanged program with {args.small}", "dim"))
        unchanged = _run_small(args, {})
    tried = []
    for proposal in proposals:
        if not proposal.changed:
            tried.append(TriedProposal(proposal, report.allocated_bytes))
            continue
        put(Prose(f"compiling with the change for {proposal.kind}: {proposal.words}", "dim"))
        row = _compiled(proposal, words, report)
        if unchanged is not None and not row.error:
            try:
                equality = equal_results.compare_results(unchanged, _run_small(args, proposal.changed))
                row = dataclasses.replace(row, numerics=equality.outcome, comparison=equality.sentence)
            except ReportError as error:
                row = dataclasses.replace(row, comparison=str(error))
        tried.append(row)
    show(tried)
    if args.write:
        _write(tried)
    return tried


def _run_small(args: argparse.Namespace, changed: Mapping[Path, str]) -> SmallRun:
    from bytescope.memory.devices import targets

    small = equal_results.parse_small(args.small)
    return equal_results.run_version(args.program, small, changed, targets.parse(args.target).n_devices)


def _compiled(proposal: Proposal, words: Sequence[str], report: ReportRecord) -> TriedProposal:
    before = report.prediction.get("seconds")
    try:
        changed = patched_program.report_with(words, proposal.changed)
    except ReportError as error:
        return TriedProposal(proposal, report.allocated_bytes, seconds_before=before, error=str(error))
    return TriedProposal(
        proposal,
        report.allocated_bytes,
        changed.allocated_bytes,
        before,
        changed.prediction.get("seconds"),
        sum(row.honored is False for row in changed.audit),
    )


def show(tried: Sequence[TriedProposal]) -> None:
    """Prints a table of the proposed changes. Then prints, for each change, a patch for `git apply` in the current
    folder, or a sentence if the change must be made by hand or does not compile."""
    from rich.text import Text

    from bytescope.memory.view.table_views import terminal_table

    if not tried:
        put(Prose("no change to propose: every request is honored or unknown, and no finding has a known change"))
        return
    put(terminal_table(TableView(COLUMNS, tried)))
    for row in tried:
        proposal = row.proposal
        if row.error:
            put(Prose(f"{proposal.kind}: {proposal.words}: does not compile: {row.error}", "red"))
        elif proposal.flags:
            put(Prose(f"{proposal.kind}: {proposal.words}"))
            if row.comparison:
                put(Prose(row.comparison, "red" if row.numerics == equal_results.DIFFERS else ""))
        elif proposal.changed:
            put(Text(f"\n{proposal.words}", "bold"))
            if row.comparison:
                put(Prose(row.comparison, "red" if row.numerics == equal_results.DIFFERS else ""))
            print(unified_diff(proposal.changed, Path.cwd()))  # not wrapped
        else:
            where = f" at {proposal.place}" if proposal.place else ""
            put(Prose(f"to change by hand, {proposal.kind}{where}: {proposal.words}"))


def _write(tried: Sequence[TriedProposal]) -> None:
    """Writes the changes that compile to the source files, except changes that change the program's results. If several
    changes are for one file, writes only the change with the fewest allocated bytes, and asks the user to run the
    command again for the others."""
    written: set[Path] = set()
    usable = [row for row in tried if row.after is not None and row.numerics != equal_results.DIFFERS]
    for row in sorted(usable, key=lambda row: row.after or 0):
        if written & row.proposal.changed.keys():
            put(
                Prose(
                    f"not written, because another change to the same file was written: {row.proposal.words}; run the "
                    "command again"
                )
            )
            continue
        for path, text in row.proposal.changed.items():
            path.write_text(text, encoding="utf-8", newline="")
            written.add(path)
            put(Prose(f"wrote {path}"))
