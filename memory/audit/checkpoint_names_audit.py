"""Audits jax.checkpoint: whether the backward pass recomputes its values, and whether named values are saved as the
remat policies ask."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bytescope.memory.audit.checkpoint_outcomes import CompiledOutcome, region_rows, rows_without_jaxpr
from bytescope.memory.audit.checkpoint_requests import CheckpointRegion, find_regions, mentioned_names, request_for
from bytescope.memory.findings.user_functions import line_of
from bytescope.memory.jaxprs import checkpoint_name_of, distinct_jaxprs
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.peak.checkpoint_names import Names, named_places
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.records.xla_records import RecomputedValue

_RECOMPUTED_BY_XLA = (
    "the policy of jax.checkpoint saves the value, but XLA recomputes the value, because the program exceeds XLA's "
    "memory limit: use a policy that saves fewer values, or reduce the batch size"
)
# Minimum similarity (difflib's ratio) of a word and its misspelling.
_SIMILAR = 0.75
_SEPARATORS = re.compile(r"[_\W]+")


def checkpoints(report: JudgedProgram, program: PlacedProgram) -> Iterator[AuditRow]:
    """Yields the audit rows of `jax.checkpoint`: one row for each source line with differentiated calls of
    jax.checkpoint, one row for each checkpoint name that a remat policy saves or recomputes, and one row for each name
    that a policy lists although no value has the name.

    If a policy offloads a name and a value has the name, the row comes from `offloads` instead. Without a jaxpr (an HLO
    dump), it is unknown what the user's code asks for; the rows then list the functions that the compiled module
    recomputes and the named values that are alive at the memory peak.

    Args:
        report: the report of the compiled step.
        program: the compiled step with its jaxpr.
    """
    outcome = CompiledOutcome(report, program.module)
    kept: dict[str, int] = defaultdict(int)
    for buffer in outcome.residuals:
        for name in filter(None, buffer.checkpoint_name.split(", ")):
            kept[name] += buffer.bytes
    if program.jaxpr is None:
        yield from rows_without_jaxpr(outcome)
        for name, size in kept.items():
            yield AuditRow("name", name, done="kept", bytes=size)
        return
    regions = find_regions(program.jaxpr)
    if regions:
        yield from region_rows(report, regions, outcome)
        carried = _lines_of_names(program.jaxpr)
        by_xla = _recomputed_by_xla(report, program)
        for name, line in carried.items():
            yield from _carried_name(name, line, kept.get(name, 0), by_xla.get(name, []), regions, outcome)
        by_policy: dict[int, CheckpointRegion] = {}
        for region in regions:
            if region.policy is not None:
                by_policy.setdefault(id(region.policy), region)
        for region in by_policy.values():
            yield from _absent_names(region, carried)


def _recomputed_by_xla(report: JudgedProgram, program: PlacedProgram) -> dict[str, list[RecomputedValue]]:
    """Returns the values that XLA's rematerialization pass recomputes, because the program needs more memory than the
    limit that XLA compiles for: checkpoint name -> values. A value without a checkpoint name has the key ""."""
    found: dict[str, list[RecomputedValue]] = defaultdict(list)
    if not report.xla_recomputed:
        return found
    module, names = program.module, Names((), named_places(program.jaxpr))
    for value in report.xla_recomputed:
        instruction = module.named(value.name)
        if instruction is None:
            continue
        metadata = [module.metadata(each) for each in (instruction, *reversed(module.fused(instruction)))]
        found[names.find(metadata)].append(value)
    return found


def _lines_of_names(jaxpr: Any) -> dict[str, str]:
    """Returns a dict: checkpoint name in the jaxpr -> "file.py:line" of the first value with this name. Values that no
    equation reads and that are not returned are left out."""
    lines: dict[str, str] = {}
    for inside in distinct_jaxprs(jaxpr):
        named = [equation for equation in inside.eqns if checkpoint_name_of(equation) not in ("", *lines)]
        read = [*inside.outvars, *(atom for equation in inside.eqns for atom in equation.invars)] if named else ()
        used = set(map(id, read))
        for equation in named:
            if id(equation.outvars[0]) in used:
                lines.setdefault(checkpoint_name_of(equation), line_of(equation))
    return lines


def _carried_name(
    name: str,
    line: str,
    size: int,
    by_xla: Sequence[RecomputedValue],
    regions: Sequence[CheckpointRegion],
    outcome: CompiledOutcome,
) -> Iterator[AuditRow]:
    """Yields the audit row of a checkpoint name that at least one value of the program has: whether a remat policy
    saves or recomputes the value, and what the compiled program does. Yields nothing if no policy saves the value and
    the backward pass does not recompute it.

    Args:
        name: the checkpoint name.
        line: "file.py:line" of the call of checkpoint_name.
        size: bytes on one device of the residuals with this name that are alive at the memory peak.
        by_xla: the values with this name that XLA's rematerialization pass recomputes.
        regions: the differentiated calls of jax.checkpoint in the program.
        outcome: what the compiled module recomputes and keeps.
    """
    saving = [region for region in regions if request_for(region.policy, name) == "save"]
    again = [region for region in regions if name in region.names]
    lost = [region for region in saving if region in again]
    if lost:
        message = (
            f"the policy of jax.checkpoint of {lost[0].title} saves {name}, but the backward pass recomputes the "
            "value: call checkpoint_name outside of functions with a custom gradient (jax.custom_vjp)"
        )
        yield AuditRow("name", name, line, "save", "recomputed", size, 0, "autodiff", message, _calls(lost))
    elif saving and by_xla:
        yield AuditRow(
            "name",
            name,
            line,
            "save",
            "recomputed",
            sum(value.bytes for value in by_xla),
            sum(value.flops for value in by_xla),
            "rematerialization",
            _RECOMPUTED_BY_XLA,
            len(by_xla),
        )
    elif saving:
        yield AuditRow("name", name, line, "save", "kept", size, count=_calls(saving))
    elif again:
        merged = [region for region in again if outcome.is_merged(region)]
        if merged:
            message = (
                f"the policy of jax.checkpoint of {merged[0].title} recomputes {name}, but XLA merges the "
                "recomputation with the forward pass and keeps the value: change this jax.checkpoint as the message "
                f"about {merged[0].title} says"
            )
            yield AuditRow("name", name, line, "recompute", "kept", size, 0, "cse", message, _calls(merged))
        else:
            yield AuditRow("name", name, line, "recompute", "recomputed", size, count=_calls(again))


def _calls(regions: Iterable[CheckpointRegion]) -> int:
    return sum(region.count for region in regions)


def _absent_names(region: CheckpointRegion, carried: dict[str, str]) -> Iterator[AuditRow]:
    """Yields one row for each checkpoint name that the remat policy of a region lists and that no value of the program
    has.

    One policy may serve several models and list the names of all of them. So if the program has at least one name of
    the policy, a missing name gets a row only if a name of the program is spelled similarly.

    Args:
        region: the calls of jax.checkpoint in one source line. Other regions with this policy get no rows.
        carried: checkpoint name in the program -> "file.py:line" of a value with this name.
    """
    requests = mentioned_names(region.policy)
    absent = [name for name in requests if name not in carried]
    unmentioned = [name for name in carried if name not in requests]
    for name in absent:
        message = f"the policy of jax.checkpoint of {region.title} lists {name}, but no value has this name: "
        alike = [other for other in unmentioned if _is_misspelling(name, other)]
        source = region.source
        if alike:
            message += f"did you mean {alike[0]}?"
            source = carried[alike[0]] or source
        elif len(absent) == len(requests):
            message += "give a value the name with jax.ad_checkpoint.checkpoint_name, and use the named value"
        else:
            continue
        yield AuditRow("name", name, source, requests[name], "ignored", undone_by="tracing", message=message)


def _is_misspelling(name: str, other: str) -> bool:
    """Returns whether one checkpoint name is probably a misspelling of the other. The names are split into words at "_"
    and punctuation; the first words must be similar, the second words, and so on. So "q_rot" is not a misspelling of
    "k_rot", although most of their letters are equal."""
    words, others = _SEPARATORS.split(name.lower()), _SEPARATORS.split(other.lower())
    if "".join(words) == "".join(others):
        return True
    if len(words) != len(others):
        return False
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= _SIMILAR for pair in zip(words, others))
