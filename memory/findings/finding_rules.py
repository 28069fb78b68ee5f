"""What can be improved in a report: each finding with its bytes and the remedy.

A rule takes (report, program) and returns what it `Found`, or None if it finds nothing, as in a program that lacks the
evidence. `RULES` lists the rules with their remedies in JAX's words; the name of a rule is the kind of the finding. The
short rules are in this file, the others in the file of their subject. A trainer replaces the remedies with those of its
own configs (train/plan/report_remedies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bytescope.memory.findings.checkpoint_findings import checkpoint_saves, xla_remat
from bytescope.memory.findings.evidence import LARGE, NOTABLE, TOY, Found, at_peak, describe_buffer
from bytescope.memory.findings.expert_findings import empty_expert_rows
from bytescope.memory.findings.sharding_findings import (
    large_collective,
    lasting_gathers,
    nothing_sharded,
    replicated_activations,
    replicated_batch,
    unsharded_gradients,
)
from bytescope.memory.findings.spare_memory import spare_memory
from bytescope.memory.findings.state_findings import not_donated, state_too_large, whole_state
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, Finding, JudgedProgram
from bytescope.memory.units import human

Rule = Callable[[JudgedProgram, PlacedProgram], Found | None]


def find(report: JudgedProgram, program: PlacedProgram) -> tuple[Finding, ...]:
    """Findings of a report, in order of decreasing bytes. `program`: the one that the report was made from."""
    findings = []
    for rule, remedy in RULES.items():
        found = rule(report, program)
        if found is not None:
            findings.append(Finding(rule.__name__, found.bytes, found.message, found.remedy or remedy))
    return tuple(sorted(findings, key=lambda finding: -finding.bytes))


def full_logits(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Logits or their gradients alive at the peak."""
    size = report.breakdown["logits_loss"]
    if size <= NOTABLE * report.peak_bytes:
        return None
    largest = max(at_peak(report, "logits_loss"), key=lambda b: b.bytes, default=Buffer("", 0))
    return Found(size, f"logits and loss hold {human(size)} at the peak, the largest {describe_buffer(largest)}")


def wide_activations(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """float32 residuals in a program that computes in bfloat16."""
    wide = [b for b in at_peak(report, "residuals") if b.shape and b.dtype == "float32"]
    size = sum(b.bytes for b in wide)
    computes = any(b.dtype == "bfloat16" for b in report.buffers if b.phase != "argument")
    asked = program.facts is not None and program.facts.compute == "bfloat16"
    if not (computes or asked) or size <= max(LARGE * report.peak_bytes, TOY):
        return None
    message = f"{human(size)} of residuals are float32 in a bfloat16 program"
    if report.target.get("platform") == "cpu":
        return Found(
            size,
            f"{message}; the CPU computes bfloat16 in float32",
            "compile for the device that it will run on, such as target='h200', where bfloat16 stays narrow",
        )
    largest = max(wide, key=lambda b: b.bytes)
    return Found(size, f"{message}, the largest {describe_buffer(largest)}")


def fragmentation(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Unused bytes between the buffers of the packed memory."""
    size = report.breakdown["fragmentation"]
    if size <= max(LARGE * report.allocated_bytes, TOY):
        return None
    return Found(size, f"{human(size)} of the allocated memory is not in use at the peak")


def idle_offload(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """A program that asks for offload and has nothing in host memory."""
    asked = program.facts.asked_of_host if program.facts else ()
    if report.host_bytes or not asked:
        return None
    return Found(0, f"{asked[0]} asks for offload, but nothing is in host memory")


def host_memory(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """More bytes in host memory than the host of the devices has."""
    available = int(report.target.get("host_memory_bytes") or 0)
    devices = min(int(report.target.get("devices_per_host") or 1), int(report.target.get("n_devices") or 1))
    size = report.host_bytes * devices
    if not available or size <= available:
        return None
    return Found(size, f"{human(size)} in host memory, which has {human(available)} for these devices")


def uneven_stash(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Residuals that every pipeline stage allocates because one does, and that a V schedule would need less of."""
    pipeline = program.facts.pipeline if program.facts else None
    if pipeline is None or pipeline.v_share is None:
        return None
    held = report.breakdown.get("residuals", 0)
    less = int(held * (1 - pipeline.v_share))
    if less <= max(NOTABLE * report.peak_bytes, TOY):
        return None
    slot = held / max(pipeline.slots)
    needed = ", ".join(f"{slot * slots / 2**30:.2f}" for slots in pipeline.slots)
    return Found(
        less,
        f"by the schedule the stages hold {needed} GiB of residuals at once, and one program allocates "
        f"{human(held)} on each",
        f"two chunks a stage, placed as a V, should free {human(less)} of them on each; the bubble is "
        f"{100 * pipeline.v_bubble:.1f} % then, {100 * pipeline.bubble:.1f} % now",
    )


RULES: Mapping[Rule, str] = {
    nothing_sharded: "shard the batch over a mesh of all devices",
    full_logits: "use a chunked or fused cross-entropy, or shard the vocabulary",
    replicated_batch: "shard the batch over the data axis of the mesh",
    replicated_activations: "pin it with jax.lax.with_sharding_constraint to the axes that shard the batch; a model "
    "with logical axes, such as Flax's, is traced inside of its rules "
    "(flax.linen.logical_axis_rules)",
    not_donated: "pass donate_argnums for the state to jax.jit",
    wide_activations: "cast it to bfloat16 where it is made, before the backward pass keeps it",
    fragmentation: "change the batch or the remat policy: the packing follows the lifetimes",
    idle_offload: "check that the policy's names exist; the CPU backend drops offload, compile for a GPU instead",
    host_memory: "use a host with more memory per device, or smaller state, such as moments in 8 bits",
    xla_remat: "the program was too large: choose a remat policy that fits by itself, or set "
    "jax_compiler_enable_remat_pass to False to compare policies",
    state_too_large: "shard the state over more devices",
    whole_state: "shard it over the mesh",
    unsharded_gradients: "pin it to the sharding of its parameter",
    spare_memory: "keep more for the backward pass",
    checkpoint_saves: "wrap it in jax.checkpoint",
    empty_expert_rows: "give a device more tokens at once: the last tile of each expert is padded",
    uneven_stash: "place the layers as a V, so that all stages hold as much",
    lasting_gathers: "gather again in the backward pass: keep gathered weights out of what the policy saves",
    large_collective: "move less at once: compute in a scan over layers, or over parts of the batch",
}
