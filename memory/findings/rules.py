"""What an expert would point at in a report: each finding with its bytes and the remedy.

A rule takes (report, program) and gives (bytes of one device, message), or None when it finds nothing, as in a
program that lacks its evidence. `RULES` has them with their remedies; a rule's name is the finding's kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bytescope.memory.attribution.placement import PlacedProgram
from bytescope.memory.config_keys import OFFLOAD
from bytescope.memory.findings.replicated import replicated_arrays
from bytescope.memory.hlo.mesh import flat
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.records import Buffer, Finding, Report
from bytescope.memory.units import human

Found = tuple[int, str] | None

# Shares of the peak (of the allocated bytes for fragmentation) from which a thing is worth a line.
LARGE, NOTABLE, SMALL = 0.10, 0.05, 0.01
_STATE = ("params", "optimizer", "accumulator")
_REMAT = re.compile(r"\.remat(\d+)?(\.|$)")


def find(report: Report, program: PlacedProgram) -> tuple[Finding, ...]:
    """Findings of a report, those of most bytes first. `program` is what the report was made from."""
    out = []
    for rule, remedy in RULES.items():
        found = rule(report, program)
        if found is not None:
            out.append(Finding(rule.__name__, *found, remedy))
    return tuple(sorted(out, key=lambda finding: -finding.bytes))


def full_logits(report: Report, program: PlacedProgram) -> Found:
    """Logits or their gradients alive at the peak."""
    size = report.breakdown["logits_loss"]
    if size <= NOTABLE * report.peak_bytes:
        return None
    return size, f"logits and loss hold {human(size)} at the peak, {_largest(report, 'logits_loss')}"


def replicated_batch(report: Report, program: PlacedProgram) -> Found:
    """The batch replicated on every device of the mesh."""
    module = program.module
    if module.devices < 2:
        return None
    size = 0
    for number, parameter in _batch(report, program).items():
        shape, known = module.shape(parameter), program.replicated
        replicated = module.replicated(parameter) if known is None else number in known
        if replicated and shape.dims:
            size += shape.bytes
    if not size:
        return None
    return size, f"the batch is replicated on all {module.devices} devices, and so is what is computed from it"


def replicated_activations(report: Report, program: PlacedProgram) -> Found:
    """Activations that are not sharded over the axes that shard the batch."""
    found = list(replicated_arrays(program, _batch(report, program)))
    if not found:
        return None
    names = {array.name for array in found}
    size = sum(b.bytes for b in report.buffers if b.at_peak and b.memory == "device" and b.name in names)
    first = found[0]
    axes = " and ".join(first.axes)
    return max(size, first.bytes), (f"activations are replicated over {axes}, which shards the batch; the first is "
                                    f"{first.what}, {first.dtype}{list(first.dims)} on every device")


def not_donated(report: Report, program: PlacedProgram) -> Found:
    """State whose argument and result each have memory of their own."""
    module, total = program.module, 0
    entry = module.computations.get(module.entry)
    outputs = [a.size for a in program.allocations if a.live_out and not a.entry_parameter and a.color == 0]
    roles = {b.name: b.category for b in report.buffers if b.phase == "argument"}
    for allocation in program.allocations:
        if not allocation.entry_parameter or allocation.live_out or entry is None:
            continue
        parameter = module.instructions.get(entry.parameters.get(allocation.parameter, -1))
        path = module.metadata(parameter).op_name if parameter else ""
        if roles.get(path) in _STATE and allocation.size in outputs:
            outputs.remove(allocation.size)
            total += allocation.size
    if total <= SMALL * report.peak_bytes:
        return None
    return total, f"{human(total)} of state is not donated: the old and the new are held at once"


def wide_activations(report: Report, program: PlacedProgram) -> Found:
    """float32 residuals in a program that computes in bfloat16."""
    wide = sum(b.bytes for b in _at_peak(report, "residuals") if b.shape and b.dtype == "float32")
    made = any(b.dtype == "bfloat16" for b in report.buffers if b.phase != "argument")
    asked = made or any("bf16" in word or "bfloat16" in word for word in _words(report.config, "precision"))
    if not asked or wide <= LARGE * report.peak_bytes:
        return None
    why = "; the CPU computes bfloat16 in float32" if report.target.get("platform") == "cpu" else ""
    return wide, f"{human(wide)} of residuals are float32 in a bfloat16 program{why}"


def fragmentation(report: Report, program: PlacedProgram) -> Found:
    """Holes in the packed memory."""
    size = report.breakdown["fragmentation"]
    if size <= LARGE * report.allocated_bytes:
        return None
    return size, f"{human(size)} of the allocated memory is not in use at the peak"


def idle_offload(report: Report, program: PlacedProgram) -> Found:
    """A program that asks for offload and holds nothing on the host."""
    wanted = any("offload" in word for word in _words(report.config, "remat"))
    asked = [key for key, value in flat(report.config).items() if key.startswith(OFFLOAD) and value is True]
    if report.host_bytes or not (wanted or asked):
        return None
    return 0, f"{asked[0] if asked else 'the policy'} asks for offload, but nothing is in host memory"


def host_memory(report: Report, program: PlacedProgram) -> Found:
    """More in host memory than the host of the devices has."""
    available = int(report.target.get("host_memory_bytes") or 0)
    devices = min(int(report.target.get("devices_per_host") or 1), int(report.target.get("n_devices") or 1))
    size = report.host_bytes * devices
    if not available or size <= available:
        return None
    return size, f"{human(size)} in host memory, which has {human(available)} for these devices"


def xla_remat(report: Report, program: PlacedProgram) -> Found:
    """XLA's rematerialization pass recomputes values to fit the device."""
    names = {i.name for i in program.module.instructions.values() if _REMAT.search(i.name)}
    if not names:
        return None
    size = sum(b.bytes for b in report.buffers if b.name in names)
    return size, f"XLA's own rematerialization pass recomputes {len(names)} values, {min(names)} among them"


def lasting_gathers(report: Report, program: PlacedProgram) -> Found:
    """Gathered parameters that are kept from the forward into the backward pass."""
    backward = _start_of_backward(report)
    kept = [b for b in report.buffers if b.category == "collectives" and "all-gather" in b.name
            and b.start < backward <= b.end and b.phase == "forward"]
    size = sum(b.bytes for b in kept)
    if size <= SMALL * report.peak_bytes:
        return None
    return size, f"{human(size)} of gathered parameters outlive the layer that needs them ({kept[0].name})"


def large_collective(report: Report, program: PlacedProgram) -> Found:
    """One collective's buffer is a good part of the peak."""
    size = max((b.bytes for b in _at_peak(report, "collectives")), default=0)
    if size <= LARGE * report.peak_bytes:
        return None
    return size, f"one collective holds {human(size)}, {_largest(report, 'collectives')}"


RULES: Mapping[Callable[[Report, PlacedProgram], Found], str] = {
    full_logits: "use a chunked or fused cross-entropy, or shard the vocabulary",
    replicated_batch: "shard the batch over the data axis of the mesh",
    replicated_activations: "pin it with jax.lax.with_sharding_constraint to the axes that shard the batch",
    not_donated: "pass donate_argnums for the state to jax.jit",
    wide_activations: "cast before the tensor is saved and name the narrow one; compile for a GPU, not for a CPU",
    fragmentation: "change the batch or the remat policy: the packing follows the lifetimes",
    idle_offload: "check that the policy's names exist; the CPU backend drops offload, compile for a GPU instead",
    host_memory: "use a host with more memory per device, or smaller state: optimizer.name=adamw_8bit",
    xla_remat: "the program was too large: choose a remat policy that fits by itself, or set "
               "jax_compiler_enable_remat_pass to False to compare policies",
    lasting_gathers: "gather again in the backward pass: keep gathered weights out of what the policy saves",
    large_collective: "gather or reduce by layer under a scan, or lower XLA's combine threshold for it",
}


def _batch(report: Report, program: PlacedProgram) -> dict[int, Instruction]:
    """The entry parameters that are the batch, by number."""
    module = program.module
    entry = module.computations.get(module.entry)
    names = {b.name for b in report.buffers if b.phase == "argument" and b.category == "batch"}
    parameters = {number: module.instructions[id] for number, id in (entry.parameters if entry else {}).items()}
    return {number: parameter for number, parameter in parameters.items()
            if module.metadata(parameter).op_name in names}


def _start_of_backward(report: Report) -> int:
    """The point at which the backward pass begins, past the end without one.

    The compiler moves single operations of one pass into the other; the point has most of each on its side.
    """
    score, best, start = 0, 0, len(report.timeline)
    for point in reversed(report.timeline):
        score += {"forward": -1, "backward": 1, "recompute": 1}.get(point.phase, 0)
        if score > best:
            best, start = score, point.index
    return start


def _at_peak(report: Report, category: str) -> list[Buffer]:
    return [b for b in report.buffers if b.at_peak and b.memory == "device" and b.category == category]


def _largest(report: Report, category: str) -> str:
    """The largest buffer of a category at the peak, as in "the largest fusion.3 bfloat16[8, 1024]"."""
    largest = max(_at_peak(report, category), key=lambda b: b.bytes, default=Buffer("", 0))
    return f"the largest {largest.name} {largest.dtype}{list(largest.shape)}"


def _words(config: Mapping[str, Any], group: str) -> list[str]:
    """Every string of one group of a config, nested (remat -> policy) or flat (remat.policy)."""
    pending = [value for key, value in config.items() if key == group or key.startswith(f"{group}.")]
    words = []
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, str):
            words.append(value)
    return words
