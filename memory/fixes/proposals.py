"""Proposes changes to a user's source files for the findings and the audit of a report.

A change that bytescope cannot make in the source text is proposed as a sentence with the line of code.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from bytescope.memory.fixes.source_edits import Edit, SourceFile, changed_text
from bytescope.memory.hlo.sources import OWN, kind_of
from bytescope.memory.program.user_program import UserFunction
from bytescope.memory.records.report_record import ReportRecord

# Kinds of findings whose change is proposed as a sentence and must be made by hand.
BY_HAND = ("full_logits", "wide_activations", "spare_memory", "weight_copies", "state_resharded", "unrolled_layers")
_POSITION = re.compile(r"args\[(\d+)\]$")


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A proposed change that should remove one problem of a program.

    Fields:
        kind: the problem: the kind of the finding, such as "not_donated", or the kind of the audit's row, such as
            "name".
        words: one sentence that describes the change.
        changed: path of a source file -> the complete new text of the file; {} if the change must be made by hand.
        place: "file.py:line" at which a change must be made by hand; "" if unknown.
        flags: flags of `bytescope train` that make the change; "" for a user's program.
    """

    kind: str
    words: str
    changed: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    place: str = ""
    flags: str = ""


def propose(report: ReportRecord, function: UserFunction, step: object, names: Collection[str]) -> list[Proposal]:
    """Returns a proposed change for each request in the report's audit that was not honored, for each of the report's
    findings about donation and remat, and for each finding that the user can only fix by hand (`BY_HAND`). Changes that
    bytescope can make in the source come first.

    Args:
        report: the report of the program.
        function: the user's function that returns the program.
        step: the step that this function returns. Its signature turns the names of arguments into the positions for
            donate_argnums.
        names: the checkpoint names in the program's jaxpr.
    """
    sources = SourceFiles([inspect.getsourcefile(function.module), *(row.source for row in report.audit)])
    return [*_edits(report, function, step, names, sources), *_by_hand(report)]


class SourceFiles:
    """The user's source files that may be edited. Files of libraries, and files that cannot be parsed, are left out.

    places: paths of source files, or source lines such as "/w/model.py:31"; None and "" are ignored.
    """

    def __init__(self, places: Iterable[str | None]):
        self.files: dict[Path, SourceFile] = {}
        for place in places:
            file = re.sub(r":\d+$", "", place or "")
            if file and kind_of(file) == OWN and Path(file) not in self.files:
                try:
                    self.files[Path(file)] = SourceFile(Path(file))
                except (OSError, ValueError):
                    continue

    def only_edit(self, make: Callable[[SourceFile], list[Edit]]) -> dict[Path, str]:
        """Returns {path: new text} for the file in which `make` finds an edit; {} if it finds edits in no file or in
        several files. `make`: function that returns the edits of a source file."""
        edited = {path: changed_text(file, edits) for path, file in self.files.items() if (edits := make(file))}
        return edited if len(edited) == 1 else {}


def _edits(
    report: ReportRecord, function: UserFunction, step: object, names: Collection[str], sources: SourceFiles
) -> Iterator[Proposal]:
    for finding in report.findings:
        if finding.kind == "not_donated":
            numbers = _positions(step, finding.subjects)
            own = function.name.rpartition(":")[2].rpartition(".")[2]
            changed = sources.only_edit(partial(SourceFile.donate, function=own, numbers=numbers)) if numbers else {}
            yield Proposal(finding.kind, f"donate {', '.join(finding.subjects)}: {finding.remedy}", changed)
        elif finding.kind == "checkpoint_saves" and finding.subjects:
            file, wrapped = Path(finding.file), finding.subjects[0]
            changed = SourceFiles([finding.file]).only_edit(partial(SourceFile.checkpoint, function=wrapped))
            yield Proposal(finding.kind, finding.remedy, changed, "" if changed else file.name)
        elif finding.kind == "spare_memory" and finding.subjects:
            changed = sources.only_edit(partial(SourceFile.policy, name=finding.subjects[0]))
            yield Proposal(finding.kind, f"{finding.message}: {finding.remedy}", changed)
    for row in report.audit:
        if row.honored is not False:
            continue
        near = difflib.get_close_matches(row.subject, names)
        if row.done == "ignored" and near:
            renamed = {new: sources.only_edit(partial(SourceFile.rename, old=row.subject, new=new)) for new in near}
            new = next((name for name in near if renamed[name]), near[0])
            words = f"replace the name {row.subject} by {new} in the remat policy"
            yield Proposal(row.kind, words, renamed[new], row.source)
        elif row.kind == "checkpoint" and row.undone_by == "cse":
            changed = sources.only_edit(partial(SourceFile.prevent_cse, function=row.subject))
            words = f"remove prevent_cse=False from jax.checkpoint of {row.subject}" if changed else row.message
            yield Proposal(row.kind, words, changed, row.source)
        elif row.kind == "offload" and row.undone_by == "scheduler":
            changed = sources.only_edit(partial(SourceFile.save_on_device, name=row.subject))
            words = f"save the name {row.subject} in device memory" if changed else row.message
            yield Proposal(row.kind, words, changed, row.source)
        else:
            yield Proposal(row.kind, row.message, {}, row.source)


def _by_hand(report: ReportRecord) -> list[Proposal]:
    return [
        Proposal(finding.kind, f"{finding.message}: {finding.remedy}")
        for finding in report.findings
        if finding.kind in BY_HAND and not finding.subjects
    ]


def _positions(step: object, roots: Sequence[str]) -> tuple[int, ...]:
    """Returns the positions of arguments in the step's signature, in ascending order; () if the step has no argument
    with one of the names. `roots`: names of the arguments, such as "state", or "args[0]" for the first one."""
    try:
        parameters = list(inspect.signature(step).parameters) if callable(step) else []
    except ValueError:
        parameters = []
    numbers = []
    for root in roots:
        match = _POSITION.match(root)
        if match:
            numbers.append(int(match[1]))
        elif root in parameters:
            numbers.append(parameters.index(root))
        else:
            return ()
    return tuple(sorted(numbers))
