"""Records about several devices: collectives, their sums, and ZeRO's accounting of the training state."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ZeroRow:
    """Bytes per parameter of one part of the training state on one device, by ZeRO's accounting and as compiled.

    `role`: a role of `LedgerRow`, "gathered" or "total"; `classic`: by Rajbhandari et al. 2020 (arXiv 1910.02054);
    `held`: compiled, at the peak; `reason`: why the two differ, "" if they agree.
    """

    role: str
    classic: float
    held: float
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation; bytes are those of one device and one execution.

    Fields:
        name: of the instruction; kind: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute ...
        axes: names of the mesh axes it spans, () when unknown; group: devices that exchange data in it.
        dtype: of the data; "bfloat16+float32" for several combined arrays, the dtype with the most bytes first.
        times: executions in one step, the product of the trip counts of the loops around it.
        bytes: the payload, the unsharded array: the result of an all-gather, the operands of any other kind.
        wire_bytes: what the device sends by the ring algorithm: (N-1)/N of the payload, an all-reduce twice that.
        phase, component, module, op_name: as in `Buffer`.
        asynchronous: whether it has a start and a done; overlapped: number of compute operations between the two;
        overlapped_flops: FLOPs of their matrix products.
        in_flight_bytes: operands and results, which stay in memory from the start to the done.
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
        """Whether nothing is computed while it runs."""
        return not self.asynchronous or not self.overlapped


@dataclasses.dataclass(frozen=True)
class Communication:
    """All collectives of one kind over the same mesh axes, bytes of one device and one step.

    `times`: executions; `bytes`: payload; `wire_bytes`: bytes that the device sends; `exposed_bytes`: the part of
    `wire_bytes` in collectives that are not overlapped; `formula_bytes`: wire bytes by the formula, None without one;
    `hosts`: maximum number of hosts that one group of devices spans, 1 if unknown.
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
