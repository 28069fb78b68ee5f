"""What a step moves over the host link."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Bytes that one step moves over a device's host link in one direction ("to device", "to host") in one phase.

    `seconds`: at the target's `host_link_bytes_per_s`, 0.0 where unknown; whether compute overlaps it is not judged.
    """

    phase: str
    direction: str
    bytes: int
    seconds: float
