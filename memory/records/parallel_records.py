"""Records about several devices: collectives, their sums, and ZeRO's accounting of the training state."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ZeroRow:
    """Bytes per parameter of one part of the training state on one device: as the ZeRO paper predicts them and as
    compiled.

    Fields:
        role: "params", "gradients" (which includes accumulators), "optimizer", "gathered" (gathered or cast copies of
            the parameters, and buffers of collectives) or "total".
        classic: bytes per parameter according to the ZeRO paper (Rajbhandari et al. 2020, arXiv 1910.02054).
        held: bytes per parameter in the compiled program, at the peak.
        reason: the reason for the difference between the two, "" if they agree.
    """

    role: str
    classic: float
    held: float
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of the compiled program. All byte counts are for one device and one execution.

    Fields:
        name: the name of the HLO instruction.
        kind: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute ...
        axes: names of the mesh axes that the collective spans, () if unknown.
        group: number of devices that exchange data with each other.
        dtype: dtype of the data; "bfloat16+float32" for several combined arrays, the dtype with the most bytes first.
        times: executions in one step, the product of the trip counts of the loops around the collective.
        bytes: the payload in bytes. It is the result of an all-gather, and the operands of any other kind.
        wire_bytes: bytes that the device sends by the ring algorithm. Over N devices, this is (N-1)/N of the payload,
            or twice as much for an all-reduce.
        phase: phase of the step, such as "backward".
        component: the part of the model, such as "attention"; "" if unknown.
        module: the named scopes around the collective, joined by "/".
        op_name: JAX's name of the operation.
        asynchronous: whether the collective has a start and a done instruction.
        overlapped: number of compute operations that run between start and done.
        overlapped_flops: FLOPs of the matrix products of these operations.
        in_flight_bytes: bytes of operands and results, which stay in memory from start to done.
        hosts: maximum number of hosts that one group of devices spans; 1 if unknown.
    """

    name: str
    kind: str
    axes: tuple[str, ...] = ()
    group: int = 1
    dtype: str = ""
    times: int = 1
    bytes: int = 0
    wire_bytes: int = 0
    phase: str = ""
    component: str = ""
    module: str = ""
    op_name: str = ""
    asynchronous: bool = False
    overlapped: int = 0
    overlapped_flops: int = 0
    in_flight_bytes: int = 0
    hosts: int = 1

    @property
    def exposed(self) -> bool:
        """True if no computation runs while the collective is in flight, so that the step waits for it."""
        return not self.asynchronous or not self.overlapped


@dataclasses.dataclass(frozen=True)
class Communication:
    """The sum of all collectives of one kind over the same mesh axes. All byte counts are for one device and one step.

    Fields:
        kind: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute ...
        axes: names of the mesh axes, () if unknown.
        group: number of devices that exchange data with each other.
        times: number of executions.
        bytes: payload in bytes.
        wire_bytes: bytes that the device sends.
        exposed_bytes: the part of `wire_bytes` that is sent by collectives without overlapping computation.
        formula_bytes: wire bytes that a published formula expects, None without a formula.
        formula: the formula in words.
        hosts: maximum number of hosts that one group of devices spans, 1 if unknown.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    times: int
    bytes: int
    wire_bytes: int
    exposed_bytes: int
    formula_bytes: int | None = None
    formula: str = ""
    hosts: int = 1
