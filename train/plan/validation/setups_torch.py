"""What PyTorch took on GPUs, measured by others, and the nearest that a config of ours says of each run.

The rows are those of `data/torch.csv`; a row's id is its number there. PyTorch launches from Python, and most of these
runs have no compiler: norms and gates are unfused there. So the levels say less than those of `setups_jax`, and nothing
is fitted on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from bytescope.train.plan.validation.measured_rows import Fact, MeasuredRow, Setup, facts, refused, row_of, shape

NAME = "torch"
# What the column `gpu` begins with -> chip.
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
# What is likely to part a prediction from what was measured -> whether it holds of a row.
DIFFERS: Mapping[str, Callable[[Fact], bool]] = {
    # Dao 2023 (arXiv 2307.08691) has up to 335 TFLOP/s on H100, Shah et al. 2024 (arXiv 2407.08608) 35 % of its peak.
    "sequences of 8,192 and more: attention of that time (FlashAttention 2 or Triton) was slower than "
    "cuDNN's now": lambda fact: fact["source_id"] == "llm_foundry" and int(fact["seq"]) >= 8192,
    "eager: norms, GELU and dropout are kernels of their own": lambda fact: fact["source_id"] not in _COMPILED,
}


@functools.cache
def rows() -> tuple[MeasuredRow, ...]:
    """Every row of the table, in its order."""
    return tuple(_row(number, fact) for number, fact in enumerate(facts(NAME)))


def _row(number: int, fact: Fact) -> MeasuredRow:
    chip = next((chip for word, chip in _CHIPS.items() if fact["gpu"].startswith(word)), "")
    gpus = int(fact["n_gpus"]) if fact["n_gpus"].isdigit() else 0
    said = refused(fact) or SETUPS.get(fact["source_id"], _because("its setup is not stated"))(fact)
    return row_of(
        NAME,
        number,
        fact,
        said,
        chip,
        gpus,
        _PER_HOST,
        setup=_setup(fact),
        bytes_are="reserved" if fact["mem_gib"] else "",
        cohort="compiled" if fact["source_id"] in _COMPILED else "eager",
        differs=_differs(fact),
    )


def _differs(fact: Fact) -> str:
    """What is likely to part a prediction from the row, the first that holds."""
    return next((why for why, holds in DIFFERS.items() if holds(fact)), "")


def _setup(fact: Fact) -> str:
    recomputed = {"True": "recomputed", "False": ""}.get(fact["act_ckpt"], fact["act_ckpt"])
    micro = f"{fact['bs_per_gpu']}x{fact['ga']}" if fact["ga"] else fact["bs_per_gpu"]
    return " ".join(filter(None, (fact["precision"], fact["parallelism"], recomputed, micro, fact["seq"])))


# What eager PyTorch keeps of a block without checkpointing, 34 sbh (Korthikanti et al. 2022, arXiv 2205.05198, section
# 4.1): inputs of norms and of GELU in 16 bits, where plain autodiff (`none`) keeps their float32 insides; compiled
# PyTorch keeps no more. Under flash attention that is `selective`, as for the Playbook's rows.
_KEPT = "selective"

# Mixed precision of FSDP in llm-foundry (composer): DEFAULT gathers in bfloat16 and reduces in float32, PURE does both
# in bfloat16; masters are float32 either way.
_FOUNDRY_PRECISION = {
    "amp_bf16/DEFAULT": {"precision.preset": "bf16", "precision.reduce": "float32"},
    "bf16/PURE": {"precision.preset": "bf16"},
}


def _foundry(fact: Fact) -> Setup:
    """MPT (llm-foundry, scripts/train/benchmarking): learned positions, layernorm, GELU of four widths, tied head,
    flash attention, gradients summed over `ga` micro-batches; blocks recomputed where checkpointing is on."""
    return "gpt3_175b", shape(fact) | _FOUNDRY_PRECISION[fact["precision"]] | {
        "batch.accumulation": fact["ga"],
        "batch.mode": "scan",
        "xla.latency_hiding": "on",
        "mesh.strategy": "zero2" if "GRAD_OP" in fact["parallelism"] else "zero3",
        "remat.policy": "full" if fact["act_ckpt"] == "True" else _KEPT,
    }


# Llama 2 by its published shape (Touvron et al. 2023, arXiv 2307.09288): layers, width, heads, width of the MLP.
_LLAMA2 = {"llama2-7b": (32, 4096, 32, 11008), "llama2-13b": (40, 5120, 40, 13824)}


def _fms(fact: Fact) -> Setup:
    """IBM's fms-fsdp, compiled: HSDP is sharded within a host, with a replica on each."""
    if fact["act_ckpt"] != "none":
        return "which of its blocks it recomputes is not stated"
    if int(fact["n_gpus"]) % _PER_HOST:
        return "part of a host"
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
        "remat.policy": _KEPT,
        "xla.latency_hiding": "on",
        "mesh.fsdp": f"{_PER_HOST}",
        "mesh.data": f"{int(fact['n_gpus']) // _PER_HOST}",
    }


def _because(reason: str) -> Callable[[Fact], Setup]:
    return lambda _: reason


_TITAN = "an H100 of 96 GB, 2.4 TB/s and 500 W, which is none of our chips"
# Source -> what says its rows, or why nothing does.
SETUPS: Mapping[str, Callable[[Fact], Setup]] = {
    "llm_foundry": _foundry,
    "fms_fsdp": _fms,
    "torchtitan_202412": _because(_TITAN),
    "torchtitan_asynctp": _because(_TITAN),
    "torchtitan_a100_2024": _because("its sequence length is not stated"),
    "kempner_mfu": _because("the width of its MLP is not stated, and its hosts have 4 GPUs"),
    "nemo_2412": _because("its shape and micro-batches are not stated"),
    "nemo_launcher": _because("its shape and layout are not stated"),
    "megatron_a100": _because("pipeline stages, which our mesh does not have"),
    "modded_nanogpt": _because("Newton-Schulz spread over devices, and values added to attention: no config of ours"),
}
