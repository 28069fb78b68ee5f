"""Published measurements of PyTorch on GPUs, each with the config that comes nearest to the measured program.

The rows are those of `data/torch.csv`; the id of a row is its index. PyTorch launches kernels from Python, and most of
these runs use no compiler, so norms and gates are not fused. Therefore their absolute seconds say less than the rows
of `setups_jax`, and no constant is fitted on them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping

from measured_rows import (
    Fact,
    MeasuredRow,
    Setup,
    facts,
    reason_not_compared,
    row_of,
    shape,
)

NAME = "torch"
# Prefix of the column `gpu` -> chip.
_CHIPS = {
    "h100_80gb": "h100",
    "H100 96GB": "h100",
    "H100 80GB": "h100",
    "a100_80gb": "a100-80g",
    "A100 80GB": "a100-80g",
    "a100_40gb": "a100-40g",
    "H200": "h200",
}
# Devices per host: 8, except in the cluster of KempnerForge.
_PER_HOST, _PER_HOST_KEMPNER = 8, 4
# Source -> year and month of its publication: the commit that added the figures, the release, or the issue.
PUBLISHED: Mapping[str, str] = {
    "automodel": "2026-06",
    "deepspeed_a800_7b": "2023-08",
    "fms_fsdp": "2024-05",
    "kempner": "2026-04",
    "llm_foundry": "2024-01",
    "megatron_a100": "2022-05",
    "megatron_a100_175b": "2022-05",
    "megatron_h100": "2024-07",
    "megatron_h100_strong": "2024-07",
    "modded_nanogpt": "2024-11",
    "nanochat": "2025-10",
    "nemo_2412": "2024-12",
    "nemo_launcher": "2024-07",
    "torchtitan_191": "2024-04",
    "torchtitan_202412": "2024-12",
    "torchtitan_a100_2024": "2024-04",
    "torchtitan_asynctp": "2025-06",
}
# Sources that ran torch.compile; the others launch each kernel from Python.
_COMPILED = ("automodel", "fms_fsdp", "kempner", "modded_nanogpt", "torchtitan_202412", "torchtitan_asynctp")
# Likely reason for a difference between prediction and measurement -> whether the reason applies to a row.
DIFFERS: Mapping[str, Callable[[Fact], bool]] = {
    # 1.30 (H100) and 1.42 (A100) times the seconds per token of the row of 4,096 tokens; our program needs 86 GiB.
    "a token took 1.3 to 1.4 times as long as with half the sequence, at the limit of the memory: probably the "
    "allocator ran out of memory": lambda fact: fact["model"] == "MPT-30b" and fact["seq"] == "8192",
    "Newton-Schulz iterations are spread over the devices; every device of ours computes all of them": lambda fact: (
        fact["source_id"] == "modded_nanogpt" and _record_date(fact) >= "2024-10-17"
    ),
    "KempnerForge sums the float32 gradients of all parameters over the micro-batches of an update and reduces them "
    "once; our program reduces the shards in every micro-batch": lambda fact: (
        fact["source_id"] == "kempner" and _is_compiled(fact)
    ),
    "eager PyTorch: norms, GELU and dropout are separate kernels": lambda fact: not _is_compiled(fact),
}


@functools.cache
def rows() -> tuple[MeasuredRow, ...]:
    """Returns the published measurements of PyTorch projects (table data/torch.csv), in the order of the table."""
    return tuple(_row(number, fact) for number, fact in enumerate(facts(NAME)))


def _row(number: int, fact: Fact) -> MeasuredRow:
    chip = next((chip for word, chip in _CHIPS.items() if fact["gpu"].startswith(word)), "")
    gpus = int(fact["n_gpus"]) if fact["n_gpus"].isdigit() else 0
    nearest = reason_not_compared(fact) or SETUPS.get(fact["source_id"], _because("its setup is not stated"))(fact)
    return row_of(
        NAME,
        number,
        fact,
        nearest,
        chip,
        gpus,
        _PER_HOST_KEMPNER if fact["source_id"] == "kempner" else _PER_HOST,
        setup=_setup(fact),
        tensor=_group_sizes(fact).get("tp", 1),
        stages=_group_sizes(fact).get("pp", 1),
        bytes_are=_kind_of_bytes(fact),
        cohort="compiled" if _is_compiled(fact) else "eager",
        framework="compiled torch" if _is_compiled(fact) else "eager torch",
        other_program=OTHER_PROGRAM.get(fact["source_id"], _no_reason)(fact),
        attention=_attention(fact),
        differs=_likely_difference(fact),
        published=PUBLISHED[fact["source_id"]],
    )


# Models of llm-foundry that ran FlashAttention 2 on 128 and more H100 (scripts/train/benchmarking/sweep.py of January
# 2024; MPT 13B and 30B ran `triton` there).
_FLASH_2_MODELS = ("MPT-1b", "MPT-3b", "MPT-7b", "MPT-70b")


def _attention(fact: Fact) -> str:
    """Returns the attention kernel that a project states for a run, a key of `achieved.ATTENTION_KERNELS`; "" if it
    states none.
    """
    if fact["source_id"] == "llm_foundry":
        # submit_benchmarks.py sets `attn_impl` of every run. Its default was `triton` when the tables of the A100 40 GB
        # (April 2023) and of up to 64 A100 80 GB and H100 (October 2023) were made, and their sweep.sh sets no other.
        # `triton` is a copy of flash-attention's flash_attn_triton.py (llmfoundry/models/layers).
        large = "Large Scale" in fact["notes"]
        return "flash-attention-2" if large and fact["model"] in _FLASH_2_MODELS else "flash-attention-1-triton"
    # fms-fsdp's README: "SDPA implementation of Flash attention v2".
    return "flash-attention-2" if fact["source_id"] == "fms_fsdp" else ""


def _likely_difference(fact: Fact) -> str:
    return next((why for why, holds in DIFFERS.items() if holds(fact)), "")


def _is_compiled(fact: Fact) -> bool:
    return fact["source_id"] in _COMPILED and not fact["framework"].endswith(" eager")


def _kind_of_bytes(fact: Fact) -> str:
    if not fact["mem_gib"]:
        return ""
    return "allocated" if "allocated" in fact["mem_kind"] else "reserved"


def _group_sizes(fact: Fact) -> dict[str, int]:
    # The sizes of the groups of devices that the table states, such as {"tp": 4, "fsdp": 8} for "tp4 fsdp8".
    return {name: int(size) for name, size in re.findall(r"\b([a-z]+)(\d+)\b", fact["parallelism"])}


def _setup(fact: Fact) -> str:
    recomputed = {"True": "recomputed", "False": ""}.get(fact["act_ckpt"], fact["act_ckpt"])
    micro = f"{fact['bs_per_gpu']}x{fact['ga']}" if fact["ga"] else fact["bs_per_gpu"]
    return " ".join(filter(None, (fact["precision"], fact["parallelism"], recomputed, micro, fact["seq"])))


# The remat policy that saves the same tensors as eager PyTorch without checkpointing: 34 sbh bytes per block
# (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1). PyTorch saves the inputs of norms and of GELU in 16 bits,
# while plain autodiff (`none`) saves their float32 intermediates. Compiled PyTorch saves no more. With flash attention
# this is `selective`, as for the Playbook's rows.
_POLICY = "selective"

# Mixed precision of FSDP in llm-foundry (composer): DEFAULT gathers in bfloat16 and reduces in float32, PURE does both
# in bfloat16. Master parameters are float32 in both.
_FOUNDRY_PRECISION = {
    "amp_bf16/DEFAULT": {"precision.preset": "bf16", "precision.reduce": "float32"},
    "bf16/PURE": {"precision.preset": "bf16"},
    "amp_fp8/DEFAULT": {"precision.reduce": "float32"},
}


def _foundry(fact: Fact) -> Setup:
    # MPT in llm-foundry (scripts/train/benchmarking) has learned positions, layernorm, GELU with an MLP four times as
    # wide as the model, a tied head and flash attention. The table's column `ga` is the number of micro-batches per
    # update. The head's result stays in bfloat16: the loss is flash-attention's FusedCrossEntropyLoss, which reads and
    # writes logits in their own dtype (llmfoundry/models/mpt/modeling_mpt.py).
    return "gpt3_175b", shape(fact) | _FOUNDRY_PRECISION[fact["precision"]] | {
        "batch.accumulation": fact["ga"],
        "batch.mode": "scan",
        "precision.logits": "bfloat16",
        "xla.latency_hiding": "on",
        "mesh.strategy": "zero2" if "GRAD_OP" in fact["parallelism"] else "zero3",
        "remat.policy": "full" if fact["act_ckpt"] == "True" else _POLICY,
    }


# The published shapes of Llama 2 (Touvron et al. 2023, arXiv 2307.09288): layers, width, heads, width of the MLP.
_LLAMA2 = {"llama2-7b": (32, 4096, 32, 11008), "llama2-13b": (40, 5120, 40, 13824)}


def _fms(fact: Fact) -> Setup:
    # IBM's fms-fsdp with torch.compile. Its strategy HSDP shards parameters within a host, and each host has a replica
    # of the model.
    if fact["act_ckpt"] != "none":
        return "it is not stated which blocks are recomputed"
    if int(fact["n_gpus"]) % _PER_HOST:
        return "the run uses only a part of a host"
    layers, width, heads, mlp = _LLAMA2[fact["model"]]
    stated = dict(fact) | {
        "layers": f"{layers}",
        "hidden": f"{width}",
        "heads": f"{heads}",
        "kv": f"{heads}",
        "ffn": f"{mlp}",
        "vocab": "32000",
    }
    return "llama_8b", shape(stated) | {
        "remat.policy": _POLICY,
        "xla.latency_hiding": "on",
        "mesh.fsdp": f"{_PER_HOST}",
        "mesh.data": f"{int(fact['n_gpus']) // _PER_HOST}",
    }


# What torchtitan's selective recomputation by operations saves (parallelize_llama.py, apply_ac): the output of
# attention and of every other matrix product: the queries, the values, the gate and the output of the MLP.
_TITAN_SAVED = "('q','v','context','gate','mlp_out')"


def _torchtitan(fact: Fact) -> Setup:
    # torchtitan (benchmarks/, docs/performance.md, train_configs/): FSDP2 gathers bfloat16 parameters and reduces in
    # float32, and parameters are float32. Tensor parallelism includes norms along the sequence. "Selective by layer"
    # recomputes every other layer; ours recomputes the first half of the layers.
    if not fact["ga"]:
        return "the number of micro-batches is not stated"
    sizes = _group_sizes(fact)
    tensor = sizes.get("tp", 1)
    if fact["act_ckpt"] in ("selective layer", "selective every-2-layer"):
        remat = {"remat.policy": _POLICY, "remat.layers": f"0-{int(fact['layers']) // 2}:full"}
    elif fact["act_ckpt"].startswith("selective"):
        remat = {"remat.policy": "custom", "remat.save": _TITAN_SAVED}
    else:
        remat = {"remat.policy": "full" if fact["act_ckpt"] == "full" else _POLICY}
    return "llama_8b", shape(fact) | remat | {
        "precision.reduce": "float32",
        "xla.latency_hiding": "on",
        "mesh.fsdp": f"{sizes['fsdp']}",
        "mesh.context": f"{sizes.get('cp', 1)}",
        "mesh.tensor": f"{tensor}",
        "mesh.sequence_parallel": f"{tensor > 1}",
    }


def _why_torchtitan_is_another_program(fact: Fact) -> str:
    return "another H100: 96 GB of HBM2e with 2.4 TB/s and a limit of 500 W" if "96GB" in fact["gpu"] else ""


def _kempner(fact: Fact) -> Setup:
    # KempnerForge (kempnerforge/distributed/parallel.py, tensor_parallel.py; benchmarks/*/*_bench.sh; configs/train):
    # parameters, their gradients and both moments are bfloat16 without float32 master parameters, and the shards of
    # gradients are reduced in float32. Ours has one of the two moments in bfloat16. FSDP2 shards parameters over
    # `fsdp`. "full" recomputes whole blocks. Tensor parallelism shards norms and the residual stream along the
    # sequence, except with experts or stages. The embedding and the logits are replicated in a tensor-parallel group;
    # ours are sharded. Ours shards the width evenly: if it is not divisible, there are fewer shards and replicas.
    sizes = _group_sizes(fact)
    shards = math.gcd(sizes.get("fsdp", 1), int(fact["hidden"]))
    tensor, stages, experts = sizes.get("tp", 1), sizes.get("pp", 1), int(fact["model"].partition("-E")[2] or 0)
    return "llama_8b", shape(fact) | {
        "precision.preset": "bf16_params",
        "precision.rounding": "nearest",
        "precision.reduce": "float32",
        "optimizer.name": "adamw_bf16",
        "batch.accumulation": fact["ga"],
        "batch.mode": "scan",
        "xla.latency_hiding": "on",
        "mesh.strategy": "zero3" if int(fact["n_gpus"]) > 1 else "ddp",
        "mesh.fsdp": f"{shards}",
        "mesh.data": f"{sizes.get('fsdp', 1) // shards}",
        "mesh.tensor": f"{tensor}",
        "mesh.sequence_parallel": f"{tensor > 1 and stages == 1 and not experts}",
        "remat.policy": _KEMPNER_REMAT[fact["act_ckpt"]],
        **({"mesh.stage": f"{stages}", "pipeline.schedule": "1f1b"} if stages > 1 else {}),
        **(
            {"model.experts": f"{experts}", "model.experts_per_token": "2", "mesh.expert": f"{sizes.get('ep', 1)}"}
            if experts
            else {}
        ),
    }


# KempnerForge's "selective" recomputes attention with its projections; ours recomputes only what is between them.
_KEMPNER_REMAT = {"full": "full", "selective": "selective", "none": _POLICY}


def _why_kempner_is_another_program(fact: Fact) -> str:
    sizes = _group_sizes(fact)
    if "moe" in fact["model"] and sizes.get("tp", 1) > 1:
        return "every rank of a tensor-parallel group computes all experts of all tokens; ours shares this work"
    if "ep" in sizes:
        return "the ranks of an expert-parallel group read the same sequences; ours are data-parallel"
    if int(fact["hidden"]) % sizes.get("fsdp", 1):
        return f"parameters in {sizes['fsdp']} uneven shards; our program has fewer, even shards and replicates them"
    if "pp" in sizes:
        return "1F1B with one program per stage, whose last stage alone has the head"
    return ""


def _automodel(fact: Fact) -> Setup:
    # NeMo AutoModel (examples/llm_benchmark, components/distributed): bfloat16 parameters, gradients reduced in
    # float32 in every micro-batch, no clipping; attention and MLP are checkpointed separately. Adapters of rank 16 are
    # on all projections of the blocks. TE's Adam has float32 moments, torch's the dtype of the parameters.
    sizes = _group_sizes(fact)
    adapters = "lora" in fact["model"]
    experts = fact["model"].partition("-E")[2]
    return "llama_8b", shape(fact) | {
        "model.qkv_bias": f"{fact['model'].startswith('qwen2.5')}",
        "batch.accumulation": fact["ga"],
        "batch.mode": "scan",
        "optimizer.clip_norm": "0.0",
        "xla.latency_hiding": "on",
        "mesh.strategy": "zero3" if int(fact["n_gpus"]) > 1 else "ddp",
        "mesh.fsdp": f"{sizes.get('fsdp', 1)}",
        "mesh.context": f"{sizes.get('cp', 1)}",
        "mesh.tensor": f"{sizes.get('tp', 1)}",
        "mesh.sequence_parallel": f"{'tp' in sizes and fact['model'].startswith('llama3')}",
        "mesh.expert": f"{sizes.get('ep', 1)}",
        "remat.policy": "full" if fact["act_ckpt"] == "full" else _POLICY,
        "remat.granularity": "parts" if fact["act_ckpt"] == "full" else "block",
        **({"lora.rank": "16", "lora.alpha": "32"} if adapters else _BF16_PARAMS),
        **({"lora.dropout": "0.1"} if fact["model"] == "llama3-8b-lora16" else {}),
        **(_QWEN3_MOE | {"model.experts": experts} if experts else {}),
    }


_BF16_PARAMS = {"precision.preset": "bf16_params", "precision.rounding": "nearest", "precision.reduce": "float32"}
_QWEN3_MOE = {
    "model.d_head": "128",
    "model.qk_norm": "True",
    "model.experts_per_token": "8",
    "optimizer.name": "adamw_bf16",
}


def _modded_nanogpt(fact: Fact) -> Setup:
    # modded-nanogpt (records/track_1_short, the script in each log): GPT-2 with rotary positions, RMSNorm and no
    # biases, DDP with gradients in float32, torch.compile, logits in one array, Muon for matrices, no clipping. Since
    # 2024-10-14 queries and keys are normalized, since 2024-11-03 the head has its own matrix. The activation is then
    # relu squared; ours is GELU.
    record = _record_date(fact)
    return "gpt2_small", shape(fact) | {
        "model.norm": "rmsnorm",
        "model.position": "rope",
        "model.bias": "False",
        "model.qk_norm": f"{record >= '2024-10-14'}",
        "model.tie_embeddings": f"{record < '2024-11-03'}",
        "model.unroll": "12" if fact["layers"] == "12" else "4",
        "precision.reduce": "float32",
        "optimizer.name": "muon",
        "optimizer.clip_norm": "0.0",
        "batch.accumulation": fact["ga"],
        "batch.mode": "scan",
        "mesh.strategy": "ddp",
        "remat.policy": _POLICY,
    }


def _record_date(fact: Fact) -> str:
    return fact["source_url"].partition("track_1_short/")[2][:10]


def _why_modded_nanogpt_is_another_program(fact: Fact) -> str:
    return (
        "shortcuts from the first layer's values and from the embedding" if _record_date(fact) >= "2024-11-06" else ""
    )


def _because(reason: str) -> Callable[[Fact], Setup]:
    return lambda _: reason


def _no_reason(fact: Fact) -> str:
    del fact
    return ""


# Source -> the function that returns why a measured program is known to be another program than ours; "" if it is not.
OTHER_PROGRAM: Mapping[str, Callable[[Fact], str]] = {
    "kempner": _why_kempner_is_another_program,
    "modded_nanogpt": _why_modded_nanogpt_is_another_program,
    "torchtitan_202412": _why_torchtitan_is_another_program,
    "torchtitan_asynctp": _why_torchtitan_is_another_program,
}


# Source -> the function that returns the config of a row, or the reason why there is none.
SETUPS: Mapping[str, Callable[[Fact], Setup]] = {
    "automodel": _automodel,
    "llm_foundry": _foundry,
    "fms_fsdp": _fms,
    "torchtitan_202412": _torchtitan,
    "torchtitan_asynctp": _torchtitan,
    "torchtitan_a100_2024": _torchtitan,
    "kempner": _kempner,
    "nemo_2412": _because("its shape and micro-batches are not stated"),
    "nemo_launcher": _because("its shape and layout are not stated"),
    "modded_nanogpt": _modded_nanogpt,
}
