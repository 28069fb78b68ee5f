"""Rules on the devices of a mesh: what is replicated, what is gathered too long or at once."""

from __future__ import annotations

from bytescope.memory.attribution.placement import PlacedProgram
from bytescope.memory.findings.evidence import LARGE, SMALL, Found, at_peak, batch, largest, start_of_backward
from bytescope.memory.findings.replicated import replicated_arrays
from bytescope.memory.records import Report
from bytescope.memory.units import human


def replicated_batch(report: Report, program: PlacedProgram) -> Found | None:
    """The batch replicated on every device of the mesh."""
    module = program.module
    if module.devices < 2:
        return None
    size = 0
    for number, parameter in batch(report, program).items():
        shape, known = module.shape(parameter), program.replicated
        replicated = module.replicated(parameter) if known is None else number in known
        if replicated and shape.dims:
            size += shape.bytes
    if not size:
        return None
    return Found(size, f"the batch is replicated on all {module.devices} devices, and so is what is computed from it")


def replicated_activations(report: Report, program: PlacedProgram) -> Found | None:
    """Activations that are not sharded over the axes that shard the batch."""
    found = list(replicated_arrays(program, batch(report, program)))
    if not found:
        return None
    names = {array.name for array in found}
    size = sum(b.bytes for b in report.buffers if b.at_peak and b.memory == "device" and b.name in names)
    first = found[0]
    axes = " and ".join(first.axes)
    message = (f"activations are replicated over {axes}, which shards the batch; the first is {first.what}, "
               f"{first.dtype}{list(first.dims)} on every device")
    return Found(max(size, first.bytes), message)


def lasting_gathers(report: Report, program: PlacedProgram) -> Found | None:
    """Gathered parameters that are kept from the forward into the backward pass."""
    backward = start_of_backward(report)
    kept = [b for b in report.buffers if b.category == "collectives" and "all-gather" in b.name
            and b.start < backward <= b.end and b.phase == "forward"]
    size = sum(b.bytes for b in kept)
    if size <= SMALL * report.peak_bytes:
        return None
    return Found(size, f"{human(size)} of gathered parameters outlive the layer that needs them ({kept[0].name})")


def large_collective(report: Report, program: PlacedProgram) -> Found | None:
    """One collective's buffer is a good part of the peak."""
    size = max((b.bytes for b in at_peak(report, "collectives")), default=0)
    if size <= LARGE * report.peak_bytes:
        return None
    return Found(size, f"one collective holds {human(size)}, {largest(report, 'collectives')}")
