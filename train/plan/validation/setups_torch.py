"""Published measurements of PyTorch on GPUs, each with the config that comes nearest to the measured program.

The rows are those of `data/torch.csv`; the id of a row is its index. PyTorch launches kernels from Python, and most of
these runs use no compiler, so norms and gates are not fused. Therefore their absolute seconds say less than the rows
of `setups_jax`, and no constant is fitted on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from bytescope.train.plan.validation.measured_rows import (
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
    "H100 80GB": "h100",
    "a100_80gb": "a100-80g",
    "A100 80GB": "a100-80g",
    "a100_40gb": "a100-40g",
    "H200": "h200",
}
_PER_HOST = 8
# Sources that ran torch.compile; the others launch each kernel from Python.
_COMPILED = ("fms_fsdp",)
# Likely reason for a difference between prediction and measurement -> whether the reason applies to a row.
DIFFERS: Mapping[str, Callable[[Fact], bool]] = {
    # 1.30 (H100) and 1.42 (A100) times the seconds per token of the row of 4,096 tokens; our program needs 86 GiB.
    "a token took 1.3 to 1.4 times as long as with half the sequence, at the limit of the memory: probably the "
    "allocator ran out of memory": lambda fact: fact["model"] == "MPT-30b" and fact["seq"] == "8192",
    "eager PyTorch: norms, GELU and dropout are separate kernels": lambda fact: fact["source_id"] not in _COMPILED,
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
        _PER_HOST,
        setup=_setup(fact),
        attention=_attention(fact),
        bytes_are="reserved" if fact["mem_gib"] else "",
        cohort="compiled" if fact["source_id"] in _COMPILED else "eager",
        framework="compiled torch" if fact["source_id"] in _COMPILED else "eager torch",
        differs=_likely_difference(fact),
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


def _because(reason: str) -> Callable[[Fact], Setup]:
    return lambda _: reason


_TITAN = "the GPU is an H100 with 96 GB, 2.4 TB/s and 500 W, which our table of chips does not have"
# Source -> the function that returns the config of a row, or the reason why there is none.
SETUPS: Mapping[str, Callable[[Fact], Setup]] = {
    "llm_foundry": _foundry,
    "fms_fsdp": _fms,
    "torchtitan_202412": _because(_TITAN),
    "torchtitan_asynctp": _because(_TITAN),
    "torchtitan_a100_2024": _because("its sequence length is not stated"),
    "kempner_mfu": _because("the width of its MLP is not stated, and its hosts have 4 GPUs"),
    "nemo_2412": _because("its shape and micro-batches are not stated"),
    "nemo_launcher": _because("its shape and layout are not stated"),
    "megatron_a100": _because("its pipeline stages are not translated into a config"),
    "modded_nanogpt": _because("no config has Newton-Schulz iterations spread over devices and value embeddings"),
}
