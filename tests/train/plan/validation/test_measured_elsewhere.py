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
    assert len(JAX) == 244 and sum(not row.reason for row in JAX.values()) == 58
    assert len(setups_torch.rows()) == 288 and sum(not row.reason for row in setups_torch.rows()) == 153
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
    assert not JAX[31].overrides and "one scale per array" in JAX[31].reason
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
    assert "heuristic" in JAX[94].reason
    assert [JAX[141].overrides[key] for key in ("batch.micro", "batch.accumulation")] == ["8", "32"]
    for row in JAX.values():
        if row.source.startswith("alpa") and not row.reason:
            of = {
                key: int(row.overrides[key])
                for key in ("mesh.fsdp", "mesh.tensor", "batch.micro", "batch.accumulation")
            }
            assert of["mesh.fsdp"] * of["mesh.tensor"] == row.gpus
            assert of["mesh.fsdp"] * of["batch.micro"] * of["batch.accumulation"] == (
                8 if row.source.startswith("alpa_intra") else 1024
            ), row


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
    assert torch == {"llm_foundry": "eager", "fms_fsdp": "compiled"}


def test_what_is_likely_to_differ_is_said_by_row():
    assert JAX[25].differs == "" and "older" in JAX[13].differs and "network" in JAX[39].differs
    torch = {int(row.id): row.differs for row in setups_torch.rows()}
    assert "allocator" in torch[55] and "eager" in torch[21] and "eager" in torch[61] and torch[208] == ""
    assert "15.0 GiB" in JAX[68].bytes_reason and JAX[67].bytes_reason == ""


def test_torch_without_checkpointing_keeps_what_eager_blocks_keep():
    kept = {"recomputed" in row.setup: row.overrides["remat.policy"] for row in setups_torch.rows() if not row.reason}
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
