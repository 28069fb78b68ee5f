"""The table of rules that find memory which a program could save, and those rules that are short.

A rule takes (report, program) and returns a `RuleResult`, or None if it finds nothing or lacks the evidence. `RULES`
lists the rules with their remedies in JAX's terms. The name of a rule is the kind of the finding. Longer rules are in
the file of their subject. A trainer replaces the remedies with settings of its configs
(train/plan/report_remedies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bytescope.memory.findings.checkpoint_findings import checkpoint_saves, kernel_runs_again
from bytescope.memory.findings.compiler_findings import (
    arguments_above_limit,
    fused_copies,
    scheduler_peak,
    unrolled_layers,
    xla_remat,
    xla_remat_falls_short,
    xla_remat_off,
)
from bytescope.memory.findings.evidence import LARGE, NOTABLE, TOY, RuleResult, at_peak, describe_buffer
from bytescope.memory.findings.expert_findings import empty_expert_rows
from bytescope.memory.findings.host_findings import pinned_growth, pinned_limit
from bytescope.memory.findings.sharding_findings import (
    large_collective,
    lasting_gathers,
    nothing_sharded,
    replicated_activations,
    replicated_batch,
    unsharded_gradients,
)
from bytescope.memory.findings.spare_memory import spare_memory
from bytescope.memory.findings.state_findings import (
    not_donated,
    on_one_device,
    state_resharded,
    state_too_large,
    weight_copies,
    whole_state,
)
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, Finding, JudgedProgram
from bytescope.memory.units import human

Rule = Callable[[JudgedProgram, PlacedProgram], RuleResult | None]


def find(report: JudgedProgram, program: PlacedProgram) -> tuple[Finding, ...]:
    """Returns the findings about a program: memory that it could save, with remedies. The finding with most bytes comes
    first.

    report: the report of the program. program: the parsed program with its mesh and layouts.
    """
    findings = []
    for rule, remedy in RULES.items():
        result = rule(report, program)
        if result is not None:
            words = result.remedy or remedy
            findings.append(
                Finding(
                    rule.__name__,
                    result.bytes,
                    result.message,
                    words,
                    options=result.options,
                    subjects=result.subjects,
                    file=result.file,
                )
            )
    return tuple(sorted(findings, key=lambda finding: -finding.bytes))


def full_logits(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the logits of all tokens, or their gradients, take a large part of the peak."""
    size = report.breakdown["logits_loss"]
    if size <= NOTABLE * report.peak_bytes:
        return None
    largest = max(at_peak(report, "logits_loss"), key=lambda b: b.bytes, default=Buffer("", 0))
    return RuleResult(size, f"logits and loss take {human(size)} at the peak, the largest {describe_buffer(largest)}")


def wide_activations(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if a program that computes in bfloat16 keeps large float32 residuals."""
    in_float32 = [b for b in at_peak(report, "residuals") if b.shape and b.dtype == "float32"]
    size = sum(b.bytes for b in in_float32)
    computes = any(b.dtype == "bfloat16" for b in report.buffers if b.phase != "argument")
    asked = program.facts is not None and program.facts.compute == "bfloat16"
    if not (computes or asked) or size <= max(LARGE * report.peak_bytes, TOY):
        return None
    message = f"{human(size)} of residuals are float32 in a bfloat16 program"
    if report.target.get("platform") == "cpu":
        return RuleResult(
            size,
            f"{message}; the CPU computes bfloat16 in float32",
            "compile for the device that it will run on, such as target='h200', which computes in bfloat16",
        )
    largest = max(in_float32, key=lambda b: b.bytes)
    return RuleResult(size, f"{message}, the largest {describe_buffer(largest)}")


def fragmentation(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the compiler's packing of buffers leaves many allocated bytes unused at the peak."""
    size = report.breakdown["fragmentation"]
    if size <= max(LARGE * report.allocated_bytes, TOY):
        return None
    return RuleResult(size, f"{human(size)} of the allocated memory is not in use at the peak")


def idle_offload(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the program's settings ask for offload to host memory, but nothing is in host memory."""
    asked = program.facts.asked_of_host if program.facts else ()
    if report.host_bytes or not asked:
        return None
    return RuleResult(0, f"{asked[0]} asks for offload, but nothing is in host memory")


def host_memory(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the program needs more host memory than the machine of the devices has."""
    available = int(report.target.get("host_memory_bytes") or 0)
    devices = min(int(report.target.get("devices_per_host") or 1), int(report.target.get("n_devices") or 1))
    size = report.host_bytes * devices
    if not available or size <= available:
        return None
    return RuleResult(
        size, f"the program needs {human(size)} in host memory, but the host has {human(available)} for these devices"
    )


def uneven_stash(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if pipeline stages hold more residuals than they need, and a V-shaped schedule would free them.
    Stages need different numbers of bytes for residuals. But all stages run one program, which allocates the maximum on
    every stage."""
    pipeline = program.facts.pipeline if program.facts else None
    if pipeline is None or pipeline.v_share is None:
        return None
    held = report.breakdown["residuals"]
    less = int(held * (1 - pipeline.v_share))
    if less <= max(NOTABLE * report.peak_bytes, TOY):
        return None
    bubbles = [f"{100 * share:.1f} %" for share in (pipeline.v_bubble, pipeline.bubble)]
    bubble = f"stays {bubbles[0]}" if bubbles[0] == bubbles[1] else f"becomes {bubbles[0]} instead of {bubbles[1]}"
    slot = held / max(pipeline.slots)
    needed = ", ".join(f"{slot * slots / 2**30:.2f}" for slots in pipeline.slots)
    return RuleResult(
        less,
        f"the schedule needs {needed} GiB of residuals on the stages, but all stages run one program, which allocates "
        f"{human(held)} on each",
        f"two chunks per stage, placed as a V, should free {human(less)} on each stage; the pipeline bubble {bubble}",
    )


RULES: Mapping[Rule, str] = {
    nothing_sharded: "shard the batch over a mesh of all devices",
    full_logits: "use a chunked or fused cross-entropy, or shard the vocabulary",
    replicated_batch: "shard the batch over the data axis of the mesh",
    replicated_activations: "constrain the activation with jax.lax.with_sharding_constraint to the axes that shard "
    "the batch; trace a model with logical axes, such as Flax's, inside its axis rules "
    "(flax.linen.logical_axis_rules)",
    not_donated: "pass donate_argnums for the state to jax.jit",
    on_one_device: "create the arrays in their sharding: jax.jit(init, out_shardings=...), or jax.device_put(array, "
    "sharding) for a batch; jnp.zeros and optimizer.init outside of jax.jit put new arrays on the first device",
    state_resharded: "give jax.jit out_shardings for the state that equal its in_shardings, or constrain the new state "
    "with jax.lax.with_sharding_constraint",
    wide_activations: "cast the residual to bfloat16 where it is computed, before it is saved for the backward pass",
    fragmentation: "change the batch or the remat policy: the packing depends on the lifetimes of buffers",
    idle_offload: "check that the policy's names exist; the CPU backend drops offload, compile for a GPU instead",
    host_memory: "use a host with more memory per device, or smaller state, such as moments in 8 bits",
    pinned_limit: "raise the limit of XLA's pool of pinned memory, or offload less",
    pinned_growth: "offload less, or use a host with more memory per device",
    xla_remat: "the program was too large: choose a remat policy that fits by itself, or set "
    "jax_compiler_enable_remat_pass to False to compare policies",
    xla_remat_falls_short: "save fewer residuals with jax.checkpoint, or reduce the batch; the program may still run, "
    "because only the allocator's limit is binding",
    xla_remat_off: "save fewer residuals with jax.checkpoint, or set jax_compiler_enable_remat_pass to True",
    arguments_above_limit: "shard the state over more devices, donate it (donate_argnums), or give jax a larger part "
    "of the GPU's memory (XLA_CLIENT_MEM_FRACTION)",
    scheduler_peak: "loop over the layers with jax.lax.scan",
    fused_copies: "switch XLA's copy fusion off",
    unrolled_layers: "loop over the layers with jax.lax.scan (nn.scan in Flax): it holds the temporaries of one layer",
    state_too_large: "shard the state over more devices",
    whole_state: "shard the state over the mesh",
    unsharded_gradients: "constrain the gradient to the sharding of its parameter",
    spare_memory: "save more residuals for the backward pass",
    weight_copies: "store the weights in the layout in which they are used: weights of a loop over layers with the "
    "axis of the layers first",
    kernel_runs_again: "leave the result out of the saved names, which frees its bytes at the same recomputation, or "
    "end the jax.checkpoint before the kernel",
    checkpoint_saves: "wrap the function in jax.checkpoint",
    empty_expert_rows: "give each device more tokens per step: the last tile of each expert is padded",
    uneven_stash: "place the layers as a V, so that all stages have the same residuals",
    lasting_gathers: "gather again in the backward pass: exclude gathered weights from the saved residuals",
    large_collective: "reduce the size of one collective: compute in a scan over layers, or over parts of the batch",
}
