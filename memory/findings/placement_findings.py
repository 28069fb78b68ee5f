"""Rules about the devices and shardings of the training state before and after a step.

The report describes one call of the step. These rules find state that makes the next call a different program, or a
call that fails before it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bytescope.memory.findings.evidence import MIN_ARRAY, STATE, RuleResult, arguments, spec_words
from bytescope.memory.hlo.mesh import ArgumentLayout
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.units import human


def state_resharded(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if a step returns updated state in another sharding than the state that it takes. The next call
    of the step is then compiled again for the new sharding. The bytes of the finding are the bytes that the new
    sharding adds on one device; 0 if it adds none."""
    root = program.module.root(program.module.entry)
    if root is None or not program.results:
        return None
    # A compiled program may first return HLO tokens, which are no results of the function.
    tokens = len(program.module.shape(root).parts or (root,)) - len(program.results)
    changed = []
    for number, (_, buffer) in arguments(report, program).items():
        argument, before = program.arguments.by_number[number], program.layouts.get(number)
        place = argument.update - tokens
        if before is None or not 0 <= place < len(program.results) or argument.role not in STATE:
            continue
        after, whole = program.results[place], _resized(buffer.bytes, before.local, before.dims)
        if before.dims == after.dims and before.local != after.local and whole >= MIN_ARRAY:
            added_bytes = _resized(buffer.bytes, before.local, after.local) - buffer.bytes
            changed.append((whole, added_bytes, argument, before, after))
    if not changed:
        return None
    added = sum(max(each[1], 0) for each in changed)
    _, _, argument, before, after = max(changed, key=lambda each: each[0])
    more = f"; {human(added)} more on each device from then on" if added else ""
    return RuleResult(
        added,
        f"{_count(len(changed), 'array')} of the state {'is' if len(changed) == 1 else 'are'} returned in another "
        f"sharding than passed in, the largest {argument.path}: {_sharding(before)} in, {_sharding(after)} out: the "
        f"next call compiles the step again{more}",
    )


def donated_twice(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if a donated argument is the same array in memory as another argument. jax refuses to run such
    a call. The bytes of the finding are 0, because the report counts the two arguments as two arrays already."""
    by_path = {argument.path: argument for argument in program.arguments.by_number.values()}
    same = [
        argument
        for argument in by_path.values()
        if argument.same_as in by_path and (argument.donated or by_path[argument.same_as].donated)
    ]
    if not same:
        return None
    first = same[0]
    more = f" ({len(same)} such arrays)" if len(same) > 1 else ""
    return RuleResult(
        0,
        f"{first.path} is the same array as {first.same_as}, and the step donates it: jax refuses the call with "
        f'"Attempt to donate the same buffer twice"{more}',
    )


def on_one_device(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if arrays of the state or the batch are on one device although the program runs on several. The
    first device then holds each whole array until the step has copied it. The bytes of the finding are the bytes of
    the whole arrays minus the bytes of the shards that the step keeps on the first device.

    For a described target, arrays of this machine may be given only for their shapes. For such a target, there is a
    finding only if other arguments are on several devices."""
    given = [argument.devices for argument in program.arguments.by_number.values()]
    described = bool(report.target.get("is_described"))
    if program.module.devices < 2 or (described and max(given, default=0) < 2):
        return None
    found = []
    for number, (_, buffer) in arguments(report, program).items():
        argument, layout = program.arguments.by_number[number], program.layouts.get(number)
        if argument.devices == 1 and layout is not None and argument.role in (*STATE, "batch"):
            found.append((_resized(buffer.bytes, layout.local, layout.dims), buffer.bytes, argument))
    whole = sum(each[0] for each in found)
    if whole < MIN_ARRAY:
        return None
    excess = whole - sum(each[1] for each in found)
    _, _, argument = max(found, key=lambda each: each[0])
    return RuleResult(
        excess,
        f"{_count(len(found), 'array')} of the arguments {'is' if len(found) == 1 else 'are'} on one device, the "
        f"largest {argument.path}: that device holds {human(excess)} more than its shards until the step has copied "
        "them",
    )


def _resized(size: int, dims: Sequence[int], other: Sequence[int]) -> int:
    # The bytes of an array of dimensions `other`, if an array of `dims` takes `size` bytes.
    return size * math.prod(other) // max(math.prod(dims), 1)


def _sharding(layout: ArgumentLayout) -> str:
    if any(layout.spec) or layout.dims == layout.local:
        return spec_words(layout.spec)
    return f"shards {list(layout.local)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
