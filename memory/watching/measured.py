"""What a running step is measured by, where a sample of its device tells more than the step."""

from __future__ import annotations

import dataclasses
from typing import Any

from bytescope.memory.devices.live import LiveMemory, sample
from bytescope.memory.records.report_record import Report


def before_arguments(device: Any, report: Report) -> LiveMemory | None:
    """What was on a device before the arguments of a step were, as far as it can be told when they are there already.

    On the CPU the process is measured, arguments and all: they are part of what is predicted.
    """
    seen = sample(device)
    if seen is None or seen.source != "host" or seen.in_use_bytes is None:
        return seen
    arguments = (report.xla.argument_bytes or 0) * seen.sharing
    return dataclasses.replace(seen, in_use_bytes=max(seen.in_use_bytes - arguments, 0))


def since(before: LiveMemory | None, seen: LiveMemory | None) -> LiveMemory | None:
    """A sample without a peak of the process from before the loop: compiling takes more than most steps."""
    if before is None or seen is None or seen.source != "host" or seen.peak_bytes != before.peak_bytes:
        return seen
    return dataclasses.replace(seen, peak_bytes=seen.in_use_bytes)
