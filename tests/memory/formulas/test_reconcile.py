"""Formulas beside the compiler: the walk over a layer by hand, its figures against compiled steps, both views."""

import dataclasses

import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.cost import flops
from bytescope.memory.formulas import reconcile, rematerialized
from bytescope.memory.formulas.model_shape import ModelShape, StepLayout, gpt
from bytescope.model.names import NAMES
from bytescope.model.remat.policies import ADAPTER_MASKS, POLICIES, QUANTIZED
from bytescope.train.program.program import build
from support.described import described
from support.exhaustive import exhaustive
from support.facts import facts_of
from support.toy import small_config, small_program

LLAMA = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True, tied=False)
GPT = gpt(12, 768, 12, 50304)
SIZES = {
    "BLD": "width",
    "BLHK": "queries",
    "BLGK": "keys",
    "BGRLS": "scores",
    "BGRL": "heads",
    "BLF": "mlp",
    "BLr": "rank",
    "BLE": "experts",
    "XD": "routed",
    "XF": "routed_mlp",
}
# Under latent attention values are narrower than keys, of which a part is rotated, and the latents differ in width.
ASYMMETRIC = {
    "v": "values",
    "context": "context",
    "k": "unrotated",
    "q_latent": "query_latent",
    "kv_latent": "latent",
    "k_rope": "rotary",
}


def test_every_name_of_a_block_has_its_size():
    outside = {"embed", "embed_mask", "final_norm", *QUANTIZED, *ADAPTER_MASKS}
    inside = {name: suffix for name, (suffix, _) in NAMES.items() if name not in outside}
    assert {name: ASYMMETRIC.get(name) or SIZES[suffix] for name, suffix in inside.items()} == {
        name: tensor.size for name, tensor in rematerialized.NAMED.items()
    }
    assert {name for name, tensor in rematerialized.NAMED.items() if tensor.itemsize == 1} == {
        name for name in NAMES if name.endswith("mask")
    } - outside


def test_full_recomputation_by_hand():
    """Everything again but the last product, of which nothing is read."""
    path = rematerialized.walk(LLAMA, "flash", ())
    assert path.kept == {"block_in"} and "mlp_out" not in path.recomputed and "kernel" in path.recomputed
    attention = 2 * 4096 * (2 * 4096 + 2 * 1024) + 4 * 4096 * 8192
    assert rematerialized.recomputed_flops(LLAMA, "flash", path.recomputed, 8192) == attention + 2 * 2 * 4096 * 14336
    assert rematerialized.forward_flops(LLAMA, "flash", 8192) == attention + 3 * 2 * 4096 * 14336


def test_what_is_not_read_costs_nothing():
    """q is read by the rotation alone, the sum by the norm: with their results kept they are not."""
    assert rematerialized.walk(LLAMA, "flash", ("q", "q_rot")).kept == {"block_in", "q_rot"}
    assert rematerialized.walk(LLAMA, "flash", ("attn_out", "mid", "mlp_out")).kept == {"block_in", "mid"}
    assert rematerialized.walk(LLAMA, "flash", ("probs", "gate")).kept == {"block_in", "gate"}
    assert rematerialized.walk(GPT, "naive", ("probs", "gate")).kept >= {"block_in", "probs"}


@pytest.mark.parametrize(("field", "inputs"), [("qk_norm", {"q", "k"}), ("post_norms", {"attn_out", "mlp_out"})])
def test_a_norm_reads_its_input(field, inputs):
    """Kept by `selective`, or recomputed with the product that it is the result of."""
    normed = dataclasses.replace(LLAMA, **{field: True})
    kept = rematerialized.walk(normed, "flash", POLICIES["selective"].names)
    assert kept.kept - rematerialized.walk(LLAMA, "flash", POLICIES["selective"].names).kept == inputs
    assert rematerialized.recomputed_flops(normed, "flash", kept.recomputed, 8192) == 0
    assert rematerialized.walk(normed, "flash", ("q_rot", "k_rot", "mid", "act")).recomputed >= inputs


def test_a_kernel_runs_again_unless_both_its_results_stay():
    assert "kernel" in rematerialized.walk(LLAMA, "flash", ("context",)).recomputed
    assert "kernel" not in rematerialized.walk(LLAMA, "flash", ("context", "lse")).recomputed


def test_the_papers_selective_row_from_names():
    """34 sbh (Korthikanti et al. 2022), from the names that the policy keeps."""
    path = rematerialized.walk(GPT, "naive", POLICIES["selective"].names)
    size = rematerialized.bytes_of(path.kept, GPT, StepLayout(), 1024, 1024, 2)
    assert size == 34 * 1024 * 768 and not {"probs", "q", "k"} & path.kept
    split = rematerialized.bytes_of(path.kept, GPT, StepLayout(8, True), 1024, 1024, 2)
    assert split == size / 8


# ---- against the trainer's own step ------------------------------------------------------------------------


def both(overrides, *, compiled=False):
    """(formula, FLOPs counted, the report or None) of a small program on the CPU."""
    program = small_program(overrides)
    formula = reconcile.formula_of(facts_of(program), "cpu")
    if compiled:
        compilation = program.compile_for_report()
        return formula, flops.count(compilation.jaxpr), report_of(compilation)
    return formula, flops.count(program.step.trace(program.state, program.batch_shapes).jaxpr), None


GELU = {"model.mlp": "gelu", "model.bias": "True", "model.norm": "layernorm", "model.position": "learned"}


@pytest.mark.parametrize(
    "overrides",
    [
        {"remat.policy": "full"},
        {"remat.policy": "sqrt", "model.n_layers": 4},
        {"remat.policy": "custom", "remat.save": "(attn_out)", "remat.offload": "(block_in)"},
        {"remat.policy": "full", "remat.layers": "(0-2:none)"},
        {"remat.policy": "full", "model.dropout": 0.1, **GELU},
        {"remat.policy": "selective", "model.post_norms": True, "model.mlp": "geglu", "model.mlp_chunk": 8},
        *exhaustive(
            {"remat.policy": "none"},
            {"remat.policy": "minimal", "model.scan": "False"},
            {"remat.policy": "custom", "remat.save": "(q_rot,v,context)"},
            {"remat.policy": "full", "remat.granularity": "parts", "model.post_norms": True},
            {"remat.policy": "selective", "model.qk_norm": True, **GELU},
            {"remat.policy": "full", "model.qk_norm": True, "batch.accumulation": 2, "batch.mode": "scan"},
        ),
    ],
    ids=lambda overrides: ",".join(map(str, overrides.values())),
)
def test_flops_equal_the_count_of_the_program(overrides):
    formula, counted, _ = both(overrides)
    assert formula.model_flops == counted.model_flops
    assert formula.hardware_flops == counted.hardware_flops


@pytest.mark.parametrize(
    "overrides",
    [
        {"remat.policy": "minimal", "pipeline.schedule": "v"},
        *exhaustive(
            {"remat.policy": "selective", "pipeline.schedule": "interleaved", "pipeline.virtual": 2, "mesh.tensor": 2},
        ),
    ],
    ids=str,
)
def test_what_stages_hold(overrides):
    """State, residuals and FLOPs of a pipeline by formula are those of the program."""
    overrides = {
        "model.n_layers": 8,
        "mesh.stage": 2,
        "mesh.fsdp": 1,
        "batch.mode": "scan",
        "batch.accumulation": 4,
        **overrides,
    }
    devices = 2 * overrides.get("mesh.tensor", 1)
    program = small_program(overrides, devices)
    compilation = program.compile_for_report()
    formula = reconcile.formula_of(facts_of(program), "cpu")
    report, counted = report_of(compilation), flops.count(compilation.jaxpr)
    assert report.breakdown["residuals"] == pytest.approx(formula.residual_bytes, rel=0.01)
    assert (counted.model_flops, counted.hardware_flops) == (formula.model_flops, formula.hardware_flops)
    assert report.breakdown["params"] == pytest.approx(formula.params_bytes, rel=0.02)
    assert formula.accumulator_bytes == report.breakdown.get("accumulator", 0) == 0


def test_a_flash_kernel_repeats_one_product_of_three():
    """One block of the chunked kernel holds the whole sequence: nothing is skipped. Its row sums of dO O are counted
    as a product, 2 a width and token; the paper's formula leaves them out."""
    formula, counted, _ = both({"remat.policy": "none", "model.attention": "chunked"})
    row_sums = 3 * 2 * 8 * 32 * 32
    assert counted.model_flops == formula.model_flops + row_sums
    assert counted.hardware_flops == formula.hardware_flops + row_sums > counted.model_flops
    skips = both({"remat.policy": "none", "model.attention": "chunked", "model.attention_chunk": 8})
    assert skips[0].model_flops > skips[1].model_flops and any("chunked" in note for note in skips[0].notes)


@pytest.mark.parametrize(
    "overrides",
    [
        {"remat.policy": "custom", "remat.save": "(up,context)", "model.n_layers": 8, "remat.granularity": "parts"},
        *exhaustive(
            {"remat.policy": "minimal", "model.n_layers": 8, "model.attention": "chunked"},
        ),
    ],
    ids=["minimal", "custom"],
)
def test_residuals_equal_the_compilers_to_the_byte(overrides):
    formula, _, report = both(overrides, compiled=True)
    assert report.breakdown["residuals"] == formula.residual_bytes > 0
    norms = (2 * 8 + 1) * 32 * 4  # which the count of parameters leaves out
    assert report.breakdown["params"] == formula.params_bytes + norms
    assert formula.gradients_bytes == formula.params_bytes == formula.optimizer_bytes / 2


def test_adapters_equal_the_compilers_to_the_byte():
    """Parameters, moments and residuals of adapters alone. Each matrix's r numbers a token are kept by their names."""
    formula, _, report = both(
        {"lora.rank": 4, "model.n_layers": 8, "model.attention": "chunked", "remat.policy": "minimal"}, compiled=True
    )
    assert report.breakdown["residuals"] == formula.residual_bytes
    assert report.breakdown["params"] == formula.params_bytes == 59392
    assert report.breakdown["gradients"] == formula.gradients_bytes
    assert formula.frozen_bytes <= report.breakdown["frozen"] <= 1.03 * formula.frozen_bytes  # norms and biases
    counters = report.breakdown["optimizer"] - formula.optimizer_bytes
    assert 0 < counters <= 16


WIDE = {
    "model.d_model": 128,
    "model.d_head": 64,
    "model.n_heads": 2,
    "model.n_kv_heads": 1,
    "model.d_ff": 256,
    "model.n_layers": 4,
    "model.vocab_size": 640,
    "data.seq_len": 64,
    "batch.micro": 2,
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "keys",
    [
        {"model.mlp_chunk": 16, "remat.policy": "selective", "precision.preset": "bf16"},
        *exhaustive(
            {"precision.preset": "fp8", "remat.policy": "selective"},
            {
                "optimizer.fused_backward": True,
                "optimizer.clip_norm": 0,
                "offload.optimizer": True,
                "remat.policy": "full",
                "precision.preset": "bf16",
            },
        ),
    ],
    ids=["tiles", "fp8", "fused, offloaded"],
)
def test_levers_have_formulas(keys):
    """On a described H200: activations within 3 % of the compiler's, state and host bytes 1 % (norms and biases), a
    fused backward pass holds no more gradients than the formula."""
    config = small_config({**WIDE, "model.attention": "cudnn", **keys})
    program = build(config, described("h200"))
    found = reconcile.formula_of(facts_of(program, "cuda"), "cuda")
    report = report_of(program.compile_for_report(), names=NAMES)
    lines = {
        line.title: line for line in reconcile.lines(found, report.peak_bytes, report.breakdown, {}, report.host_bytes)
    }
    assert abs(lines["activations kept"].share) < 0.03 and abs(lines["parameters"].share) < 0.01
    moments = lines["host memory" if "offload.optimizer" in keys else "optimizer state"]
    assert moments.formula and abs(moments.share) < 0.01
    if "optimizer.fused_backward" in keys:
        assert 0 < lines["gradients"].compiler <= 1.01 * lines["gradients"].formula
        assert lines["gradients"].formula < 0.5 * lines["parameters"].formula


def formula(program, platform="", **changes):
    """The formulas of a program with some keys of its config changed."""
    return reconcile.formula_of(facts_of(program, platform, **changes), platform)


@pytest.mark.parametrize(
    ("strategy", "divided"), [("ddp", (1, 1, 1)), ("zero1", (4, 1, 4)), ("zero2", (4, 4, 4)), ("zero3", (4, 4, 4))]
)
def test_strategies_divide_what_they_say(strategy, divided):
    program = small_program({"remat.policy": "full"})
    one = formula(program, **{"mesh.strategy": strategy})
    four = formula(program, **{"mesh.strategy": strategy, "mesh.fsdp": 4})
    names = ("params_bytes", "gradients_bytes", "optimizer_bytes")
    assert tuple(getattr(one, name) / getattr(four, name) for name in names) == divided
    assert four.residual_bytes == one.residual_bytes and four.model_flops == 4 * one.model_flops
    copied = (four.peak_bytes - sum(getattr(four, name) for name in names)) - (
        one.peak_bytes - sum(getattr(one, name) for name in names)
    )
    assert copied == (one.params_bytes if strategy in ("zero1", "zero2") else 0)


def test_a_ring_and_accumulation():
    program = small_program({"remat.policy": "full"})
    one, ring = (formula(program, **{"mesh.context": n}) for n in (1, 2))
    assert ring.residual_bytes == one.residual_bytes / 2 and ring.model_flops == one.model_flops
    more = formula(program, **{"batch.accumulation": 2})
    assert one.accumulator_bytes == 0 and more.accumulator_bytes == more.params_bytes
    assert more.peak_bytes == one.peak_bytes + more.params_bytes and more.model_flops == one.model_flops


def test_offload_moves_bytes_where_there_is_another_memory():
    program = small_program({"remat.policy": "offload"})
    here, there = (formula(program, platform) for platform in ("cpu", "cuda"))
    assert (here.residual_bytes, here.host_bytes) == (3 * 8 * 32 * 32 * 4, 0)
    assert (there.residual_bytes, there.host_bytes) == (0, 3 * 8 * 32 * 32 * 4)


def test_a_policy_without_a_formula_has_none():
    found, counted, _ = both({"remat.policy": "dots"})
    assert (found.residual_bytes, found.peak_bytes, found.hardware_flops) == (None, None, None)
    assert found.model_flops == counted.model_flops and any(note.startswith("dots:") for note in found.notes)
    assert "shampoo" in formula(small_program(), **{"optimizer.name": "shampoo"})
