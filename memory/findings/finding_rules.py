"""What an expert would point at in a report: each finding with its bytes and the remedy.

A rule takes (report, program) and gives what it `Found`, or None when it finds nothing, as in a program that lacks its
evidence. `RULES` has them with their remedies in JAX's words; a rule's name is the finding's kind. A trainer puts the
remedies of its own configs in their place (train/plan/report_remedies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bytescope.memory.findings.activation_findings import fragmentation, full_logits, wide_activations
from bytescope.memory.findings.checkpoint_findings import checkpoint_saves, xla_remat
from bytescope.memory.findings.evidence import Found
from bytescope.memory.findings.expert_findings import empty_expert_rows
from bytescope.memory.findings.host_findings import host_memory, idle_offload
from bytescope.memory.findings.sharding_findings import (
    large_collective,
    lasting_gathers,
    nothing_sharded,
    replicated_activations,
    replicated_batch,
    unsharded_gradients,
)
from bytescope.memory.findings.spare_memory import spare_memory
from bytescope.memory.findings.stage_findings import uneven_stash
from bytescope.memory.findings.state_findings import not_donated, state_too_large, whole_state
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Finding, JudgedProgram

Rule = Callable[[JudgedProgram, PlacedProgram], Found | None]


def find(report: JudgedProgram, program: PlacedProgram) -> tuple[Finding, ...]:
    """Findings of a report, those of most bytes first. `program` is what the report was made from."""
    out = []
    for rule, remedy in RULES.items():
        found = rule(report, program)
        if found is not None:
            out.append(Finding(rule.__name__, found.bytes, found.message, found.remedy or remedy))
    return tuple(sorted(out, key=lambda finding: -finding.bytes))


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
