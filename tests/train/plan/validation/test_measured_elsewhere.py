"""Rows of JAX and of PyTorch on GPUs: which are said, how, and why the others are not."""

import math

import pytest

from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.seconds.achieved import ATTENTION_KERNELS
from bytescope.train.plan.validation import measured_rows, setups_jax, setups_torch

pytestmark = pytest.mark.quick

JAX = {int(row.id): row for row in setups_jax.rows()}
BOTH = [*setups_jax.rows(), *setups_torch.rows()]


def test_every_row_is_said_or_has_its_reason():
    torch = setups_torch.rows()
    assert (len(JAX), len(torch)) == (254, 332)
    assert [sum(not row.reason for row in rows) for rows in (JAX.values(), torch)] == [104, 264]
    claimed = [sum(not (row.reason or row.other_program) for row in rows) for rows in (JAX.values(), torch)]
    assert claimed == [72, 209]
    for row in BOTH:
        assert bool(row.reason) != bool(row.config and row.overrides and row.target), row
        assert row.reason or (row.chip in CHIPS and (row.measured_seconds or row.measured_bytes)), row
        assert len(row.source.split(": ", 1)) == 2 and row.quality in "ABC", row
        assert row.reason or row.quality != "C", row


def test_sets_by_name():
    assert measured_rows.rows("jax") == setups_jax.rows() and measured_rows.rows("torch") == setups_torch.rows()


def test_devices_of_a_target_are_those_of_the_row():
    for row in BOTH:
        if not row.reason:
            assert math.prod(int(n) for n in row.target.partition(":")[2].split("x")) == row.gpus, row


def test_maxtext_is_sharded_in_a_host_with_replicas_over_hosts():
    best, spread = JAX[0], JAX[42]
    assert (best.target, best.measured_seconds, best.quality) == ("h100:8", 0.721, "A")
    assert best.overrides["remat.policy"] == "minimal" and best.overrides["model.scan"] == "False"
    assert (spread.overrides["mesh.fsdp"], spread.overrides["mesh.data"], spread.target) == ("8", "16", "h100:16x8")


def test_names_that_maxtexts_policies_keep():
    assert "mlp_out" in JAX[25].overrides["remat.save"] and "precision.preset" not in JAX[25].overrides
    assert JAX[31].overrides["precision.preset"] == "fp8" and "one scale per array" in JAX[31].other_program
    assert "'context'" in JAX[43].overrides["remat.save"] and JAX[43].target == "h200:32x8"
    assert (JAX[28].overrides["mesh.data"], JAX[28].overrides["mesh.prefetch"]) == ("4", "1")
    assert JAX[37].reason == "its remat policy is not stated"


def test_pax_recomputes_175b_whole_and_126m_not_at_all():
    """Only GPT5B sets the policy that the table has for all three."""
    policies = {JAX[n].model: JAX[n].overrides["remat.policy"] for n in (1, 3, 5)}
    assert policies == {"gpt-126m": "none", "gpt-5b": "dots_no_batch", "gpt-175b": "full"}
    assert JAX[1].overrides["mesh.strategy"] == "ddp"
    assert JAX[3].overrides["model.attention"] == "naive" and "model.attention" not in JAX[4].overrides


def test_meshes_of_alpa_are_data_by_tensor():
    mixed, plain, stage3 = JAX[76], JAX[79], JAX[90]
    assert [mixed.overrides[key] for key in ("mesh.fsdp", "mesh.tensor", "batch.micro")] == ["4", "2", "2"]
    assert (
        mixed.tensor == 2 and plain.overrides["mesh.strategy"] == "ddp" and stage3.overrides["mesh.strategy"] == "zero3"
    )
    assert "heuristic" in JAX[94].other_program and not JAX[91].other_program  # one device shards nothing
    assert "one of several meshes" in JAX[120].other_program and JAX[120].overrides["mesh.expert"] == "4"
    assert [JAX[141].overrides[key] for key in ("batch.micro", "batch.accumulation")] == ["8", "32"]
    for row in JAX.values():
        if row.source.startswith("alpa") and not row.reason:
            of = {key: int(value) for key, value in row.overrides.items() if value.isdigit()}
            data = of["mesh.fsdp"] * of.get("mesh.expert", 1)
            assert data * of["mesh.tensor"] * row.stages == row.gpus
            batches = {"alpa_intra": 8, "alpa_e2e": 1024, "alpa_readme": 32}
            assert data * of["batch.micro"] * of["batch.accumulation"] == batches[row.source_id], row


def test_layers_of_alpa_have_experts_by_turns_and_wide_mlps():
    """Each token has room in two experts on average; the solver shards experts over the data-parallel devices."""
    row = JAX[162]
    keys = ("model.experts", "model.moe_every", "model.d_ff", "model.capacity_factor", "mesh.expert", "mesh.fsdp")
    assert [row.overrides[key] for key in keys] == ["16", "2", "8192", "1.0", "8", "1"]
    assert JAX[133].overrides["mesh.expert"] == "1" and "one-hot" in JAX[133].other_program


def test_slices_of_tpus_offload_the_named_tensors():
    assert (JAX[244].target, JAX[250].target) == ("v6e:2x4", "v6e:4x8")
    assert JAX[250].overrides["remat.offload"] == "('block_in','q_rot','k_rot','v')"
    assert "32 TPU chips" in JAX[251].reason


def test_adapters_of_pax():
    assert JAX[22].overrides["lora.rank"] == "32" and "lora.rank" not in JAX[20].overrides
    assert {JAX[n].overrides["remat.policy"] for n in range(20, 25)} == {"none"}


def test_hosts_of_kempnerforge_have_four_gpus_and_stages_no_sequence_parallelism():
    rows = {row.id: row for row in setups_torch.rows() if row.source_id == "kempner" and not row.reason}
    assert rows["207"].target == "h200:8x4" and rows["207"].overrides["model.d_ff"] == "28672"
    assert (rows["198"].overrides["mesh.tensor"], rows["198"].overrides["mesh.sequence_parallel"]) == ("4", "True")
    assert (rows["201"].framework, rows["202"].framework) == ("eager torch", "compiled torch")
    assert [rows["316"].overrides[key] for key in ("mesh.fsdp", "mesh.data")] == ["8", "3"]
    assert "uneven" in rows["316"].other_program and rows["323"].overrides["mesh.fsdp"] == "40"
    staged = rows["296"]
    assert (staged.stages, staged.tensor, staged.overrides["mesh.sequence_parallel"]) == (4, 4, "False")
    assert staged.other_program and not rows["307"].other_program and rows["307"].overrides["model.experts"] == "8"


def test_records_of_modded_nanogpt_by_date():
    rows = {row.id: row for row in setups_torch.rows() if row.source_id == "modded_nanogpt" and not row.reason}
    keys = ("model.qk_norm", "model.tie_embeddings")
    assert [rows["262"].overrides[key] for key in keys] == ["False", "True"]
    assert [rows["273"].overrides[key] for key in keys] == ["True", "False"]
    assert "devices" in rows["264"].differs and "shortcuts" in rows["285"].other_program


def test_torchtitan_recomputes_by_layers_or_by_operations():
    rows = {row.id: row for row in setups_torch.rows() if row.source_id.startswith("torchtitan")}
    assert rows["191"].overrides["remat.layers"] == "0-20:full"
    assert "'gate'" in rows["192"].overrides["remat.save"] and rows["188"].overrides["remat.policy"] == "full"
    assert rows["156"].framework == "eager torch" and "96 GB" in rows["157"].other_program
    assert rows["164"].overrides["mesh.context"] == "4"


def test_uva_checkpoints_halves_or_blocks():
    assert [JAX[n].overrides["remat.granularity"] for n in (65, 66)] == ["parts", "block"]
    assert [JAX[n].overrides["model.scan"] for n in (63, 64)] == ["True", "False"]
    assert JAX[65].measured_bytes == int(3.9 * 2**30) and JAX[65].bytes_are == "allocated"


def test_bytes_of_alpa_are_compared_without_data_parallelism():
    """With it the device holds, at once, what Alpa's one reduction of all gradients waits for."""
    assert not any(JAX[n].bytes_reason for n in (62, 67, 69, 71, 74, 78))
    assert all("one combined reduction" in JAX[n].bytes_reason for n in (70, 72, 73, 76, 77, 88, 89, 90))
    for number, width, data, tensor in ((72, 4096, 4, 1), (73, 4096, 2, 2), (70, 3072, 2, 1)):
        # float16 parameters and gradients, float32 masters and moments sharded
        whole = (8 * 12 * width**2 + 25600 * width) / tensor * (2 + 12 / data + 2)
        assert whole < JAX[number].measured_bytes < 1.2 * whole


def test_rows_of_one_device_are_one_program():
    """No strategy shards anything there."""
    assert JAX[69].overrides == JAX[79].overrides == JAX[87].overrides != JAX[88].overrides


def test_rows_are_scored_by_quality_and_vintage_and_by_framework():
    assert {JAX[n].cohort for n in (0, 1, 25, 69)} == {"A, newest"}
    assert (JAX[11].cohort, JAX[15].cohort, JAX[38].cohort) == ("A, older", "A, older", "B, newest")
    torch = {row.source_id: row.cohort for row in setups_torch.rows() if not row.reason}
    assert (torch["llm_foundry"], torch["fms_fsdp"], torch["torchtitan_202412"]) == ("eager", "compiled", "compiled")


def test_what_is_likely_to_differ_is_said_by_row():
    assert JAX[25].differs == "" and "older" in JAX[13].differs and "network" in JAX[39].differs
    torch = {int(row.id): row.differs for row in setups_torch.rows()}
    assert "allocator" in torch[55] and "eager" in torch[21] and "eager" in torch[61] and torch[208] == ""
    assert "15.0 GiB" in JAX[68].bytes_reason and JAX[67].bytes_reason == ""


def test_torch_without_checkpointing_keeps_what_eager_blocks_keep():
    rows = [row for row in setups_torch.rows() if row.source_id in ("llm_foundry", "fms_fsdp") and not row.reason]
    kept = {"recomputed" in row.setup: row.overrides["remat.policy"] for row in rows}
    assert kept == {True: "full", False: "selective"}


def test_llm_foundry_reduces_by_its_precision():
    said = [row for row in setups_torch.rows() if not row.reason and row.source.startswith("llm_foundry")]
    pure = next(row for row in said if row.setup.startswith("bf16/PURE"))
    mixed = next(row for row in said if row.setup.startswith("amp_bf16"))
    assert "precision.reduce" not in pure.overrides and mixed.overrides["precision.reduce"] == "float32"
    assert mixed.chip == "h100"
    batches = [int(fact["gbs"] or 0) for fact in measured_rows.facts("torch")]
    for row in said:
        micro = int(row.overrides["batch.micro"]) * int(row.overrides["batch.accumulation"])
        assert row.gpus * micro == batches[int(row.id)], row


def test_rows_are_configs_of_ours():
    from bytescope.train.plan.config_factory import check_config

    for row in BOTH[::5]:
        if row.config:
            check_config(row.config, list(row.overrides.items()))


def test_rows_of_pytorch_name_the_attention_kernel_that_their_project_states():
    kernels = {}
    for row in setups_torch.rows():
        if not row.reason:
            key = row.source_id, row.gpus >= 128 and row.chip == "h100", row.model
            kernels.setdefault(key, set()).add(row.attention)
    assert kernels["llm_foundry", True, "MPT-7b"] == {"flash-attention-2"}
    assert kernels["llm_foundry", True, "MPT-13b"] == {"flash-attention-1-triton"}
    assert kernels["llm_foundry", False, "MPT-7b"] == {"flash-attention-1-triton"}
    assert kernels["fms_fsdp", False, "llama2-7b"] == {"flash-attention-2"}
    assert {row.attention for row in setups_jax.rows()} == {""}
    assert {row.attention for row in BOTH} - {""} <= set(ATTENTION_KERNELS)
