"""What JAX took on GPUs, measured by others, and the nearest that a config of ours says of each run.

The rows are those of `data/jax.csv`; a row's id is its number there. What a table leaves open was read in the code and
the launch scripts of its project, which the functions below name. Beside what they say our programs share with the
measured ones that masters and moments are float32, products and gradients narrow, the logits one array, and the update
AdamW's. Other than ours: XLA is of the vintage of the run, and schedules of dgxc were guided by a profile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from bytescope.train.plan.validation.measured_rows import Fact, MeasuredRow, Setup, facts, refused, row_of, shape

NAME = "jax"
# The first of these words that the column `gpu` has -> chip, devices of a host.
_CHIPS = {
    "GB200": ("", 4),
    "B200": ("b200", 8),
    "H200": ("h200", 8),
    "H100": ("h100", 8),
    "A100": ("a100-80g", 8),
    "V100": ("v100", 8),
    "A5000": ("a5000", 8),
}


# Sources of which a later release was measured too.
OLDER = ("pax_2023-08", "pax_2023-07-oldest", "dgxc_l2_70b_old")
# What is likely to part a prediction from what was measured -> whether it holds of a row and its chip.
DIFFERS: Mapping[str, Callable[[Fact, str], bool]] = {
    "an older release, which was up to 1.6 times slower than the next one": lambda fact, chip: (
        fact["source_id"] in OLDER
    ),
    "Transformer Engine or not is one program of ours, since its attention is unfused either way": lambda fact, chip: (
        fact["model"] == "gpt-126m"
    ),
    "network: replicas over hosts of GCP's A3, whose links (GPUDirect-TCPX) nobody of our sources "
    "measured": lambda fact, chip: fact["source_id"] == "maxtext_a3_l2_7b" and int(fact["n_gpus"]) > 8,
    "in bfloat16 with whole recomputation it would have run at about 80 % of the data sheet: less "
    "recomputed, or fp8": lambda fact, chip: chip == "b200",
    "an A5000 in a notebook: its clock, and most rates, are carried over from other chips": lambda fact, chip: (
        chip == "a5000"
    ),
}


@functools.cache
def rows() -> tuple[MeasuredRow, ...]:
    """Every row of the table, in its order."""
    return tuple(_row(number, fact) for number, fact in enumerate(facts(NAME)))


def _row(number: int, fact: Fact) -> MeasuredRow:
    chip, per_host = next((found for word, found in _CHIPS.items() if word in fact["gpu"]), ("", 8))
    gpus = int(fact["n_gpus"] or 0)
    said = refused(fact) or SETUPS.get(fact["source_id"], _because("no decoder of ours"))(fact)
    return row_of(
        NAME,
        number,
        fact,
        said,
        chip,
        gpus,
        per_host,
        setup=" ".join(filter(None, (fact["precision"], fact["parallelism"], fact["remat"]))),
        tensor=int("1" if isinstance(said, str) else said[1].get("mesh.tensor", "1")),
        bytes_are="allocated" if fact["mem_gib"] else "",
        bytes_reason=BYTES.get(fact["source_id"], _compared)(fact) if fact["mem_gib"] else "",
        cohort=f"{fact['quality']}, {'older' if fact['source_id'] in OLDER else 'newest'}",
        differs=_differs(fact, chip),
    )


def _differs(fact: Fact, chip: str) -> str:
    """What is likely to part a prediction from the row, the first that holds."""
    return next((why for why, holds in DIFFERS.items() if holds(fact, chip)), "")


def _maxtext_7b(fact: Fact) -> Setup:
    """JAX-Toolbox's and GCP's scripts: layers unrolled, sharded within a host, a replica on each. `minimal_flash` and
    `minimal_with_context` keep products with weights and what attention made (MaxText, layers/decoders.py)."""
    return "llama_8b", shape(fact) | {
        "remat.policy": "minimal",
        "model.scan": "False",
        "xla.latency_hiding": "on",
        "mesh.fsdp": "8",
        "mesh.data": f"{int(fact['n_gpus']) // 8}",
    }


# What policies of MaxText keep (layers/decoders.py), by our names: queries and keys carry theirs after the rotation.
_PROJECTIONS = "'q_rot','k_rot','v','attn_out'"
_KEPT = {
    "save_dot_except_mlpwi": f"({_PROJECTIONS},'mlp_out')",
    "save_dot_except_mlp": f"({_PROJECTIONS})",
    "save_dot_with_context_except_mlp": f"({_PROJECTIONS},'context')",
}


def _maxtext_70b(fact: Fact) -> Setup:
    """dgxc-benchmarking (maxtext/configure.sh, README_70b.md) and gpu-recipes: layers scanned, and a loop whose
    collectives XLA pipelines, so that a layer's parameters come while the one before it computes: `mesh.prefetch`."""
    replicas = next((part.removeprefix("dcn_dp") for part in fact["parallelism"].split(" x ") if "dcn_dp" in part), "1")
    policy = fact["remat"].partition(":")[0].split()[-1:]
    if not policy or policy[0] not in _KEPT:
        return _NO_REMAT
    return "llama_8b", shape(fact) | {
        "remat.policy": "custom",
        "remat.save": _KEPT[policy[0]],
        "xla.latency_hiding": "on",
        "mesh.prefetch": "1",
        "mesh.data": replicas,
        "mesh.fsdp": "-1",
    }


def _maxtext_b200(fact: Fact) -> Setup:
    """gpu-recipes: fully sharded, layers scanned and recomputed."""
    return "llama_8b", shape(fact) | {"remat.policy": "full", "xla.latency_hiding": "on", "mesh.prefetch": "1"}


# Pax, paxml/contrib/gpu/scripts_gpu/configs.py. 126M has no repeated layers, and what is not repeated is not
# checkpointed. GPT5B alone sets SAVE_DOT_WITH_NO_BATCH_DIM; GPT175B, derived from 126M, has the default of
# tasks/lm/model_params.py, SAVE_NOTHING. The table's column is wrong there: what it says needs 264 GiB of a device.
_PAX_REMAT = {"gpt-126m": "none", "gpt-5b": "dots_no_batch", "gpt-175b": "full"}
_PAX_126M = {"mesh.strategy": "ddp", "model.scan": "False", "model.unroll": "1", "model.attention": "naive"}


def _pax(fact: Fact) -> Setup:
    """Scores exist in rows without Transformer Engine, and in those of 126M, which the table calls unfused."""
    if "tp2" in fact["parallelism"]:
        return "the batch of its tensor groups is not stated"
    small = fact["model"] == "gpt-126m"
    unfused = {} if "TE" in fact["precision"] else {"model.attention": "naive"}
    return "gpt3_175b", shape(fact) | {
        "remat.policy": _PAX_REMAT[fact["model"]],
        "model.vocab_multiple": "128",
        **(_PAX_126M if small else {"xla.latency_hiding": "on", **unfused}),
    }


_ALPA = {
    "precision.preset": "fp16",
    "precision.loss_scale": "none",
    "precision.cast": "step",
    "precision.reduce": "float16",
    "precision.logits": "float16",
    "optimizer.clip_norm": "0.0",
    "model.tie_embeddings": "False",
    "model.scan": "False",
    "model.unroll": "1",
    "remat.policy": "full",
    "batch.mode": "scan",
    "model.attention": "naive",
}
# Alpa's solver may replace an all-reduce of gradients by reduce-scatter and all-gather, which is ZeRO-2.
_ALPA_STRATEGY = {
    "data_parallel": "ddp",
    "zero_2": "zero2",
    "zero_3": "zero3",
    "auto_sharding": "zero2",
    "intra_only": "zero2",
}


def _alpa(fact: Fact) -> Setup:
    """Alpa's GPT (benchmark/alpa/benchmark_one_case_gpt_bert.py): parameters, gradients and logits in float16 with
    float32 masters, AdamW without clipping, no loss scale, a head of its own. Mesh A x B: A data, B tensor parallel."""
    kind, _, mesh = fact["parallelism"].partition(" mesh ")
    if "gpt" not in fact["model"]:
        return "experts or convolutions: no decoder of ours"
    if kind not in _ALPA_STRATEGY:
        return _NO_MESH if kind == "heuristic" else _NO_STAGES
    data, tensor = mesh.split("x")
    accumulation = int(fact["ga"])
    return "gpt2_small", shape(fact) | _ALPA | {
        "batch.micro": f"{int(fact['gbs']) // accumulation // int(data)}",
        "batch.accumulation": f"{accumulation}",
        "mesh.strategy": _ALPA_STRATEGY[kind] if fact["n_gpus"] != "1" else "ddp",
        "mesh.fsdp": data,
        "mesh.tensor": tensor,
    }


def _alpa_bytes(fact: Fact) -> str:
    """Alpa combines collectives without a limit (alpa/global_env.py: all_reduce_threshold of 1 << 60), so that whole
    float16 gradients wait for one reduction over data parallel devices, beside float16 parameters that are part of its
    state. XLA reduces ours as they are made, and frees a layer's copy of its parameters after its backward pass."""
    data = fact["parallelism"].rpartition(" mesh ")[2].split("x")[0]
    return "" if data == "1" else _WHOLE_GRADIENTS


def _uva(fact: Fact) -> Setup:
    """UvA's tutorial (single_gpu_transformer): dropout of 0.1, unfused attention, bias, Adam without clipping;
    "MLP,Attn" checkpoints both halves of a block. It norms queries and keys too."""
    return "gpt2_small", shape(fact) | {
        "model.dropout": "0.1",
        "model.attention": "naive",
        "model.tie_embeddings": "False",
        "model.unroll": "1",
        "model.scan": str(fact["scan"] == "1"),
        "precision.preset": fact["precision"],
        "batch.mode": "scan",
        "batch.accumulation": fact["ga"],
        "optimizer.clip_norm": "0.0",
        "remat.policy": "none" if fact["remat"] == "none" else "full",
        "remat.granularity": "parts" if fact["remat"] == "MLP,Attn" else "block",
    }


def _uva_bytes(fact: Fact) -> str:
    """What a batch of 256 takes is out of line with the other rows of its policy: 2.3 GiB for 48 sequences more."""
    return (
        ""
        if fact["gbs"] != "256"
        else (
            "the rows beside it, 3.9 GiB with 16 sequences at once and 6.2 with 64, put its 15.0 GiB at some 250 "
            "at once: "
            "its micro-batch is not the 64 that is stated"
        )
    )


_NO_REMAT, _NO_STAGES = "its remat policy is not stated", "pipeline stages, which our mesh does not have"
_WHOLE_GRADIENTS = "Alpa holds all gradients whole for one combined reduction; ours are reduced as each is made"
_NO_MESH = "the heuristic shards the largest dimension of every array: no mesh of ours"


def _because(reason: str) -> Callable[[Fact], Setup]:
    return lambda _: reason


def _compared(fact: Fact) -> str:
    del fact
    return ""


# Source -> why the bytes of a row are not compared, "" where they are.
BYTES: Mapping[str, Callable[[Fact], str]] = {"alpa_intra": _alpa_bytes, "uva_single": _uva_bytes}
# Source -> what says its rows, or why nothing does.
SETUPS: Mapping[str, Callable[[Fact], Setup]] = {
    "jaxtoolbox_maxtext": _maxtext_7b,
    "maxtext_a3_l2_7b": _maxtext_7b,
    "dgxc_l2_70b": _maxtext_70b,
    "dgxc_l2_70b_old": _maxtext_70b,
    "gpurecipes_h200_70b": _maxtext_70b,
    "gpurecipes_b200_405b": _maxtext_b200,
    "gpurecipes_b200_70b": _maxtext_b200,
    "pax_2024-04": _pax,
    "pax_2023-08": _pax,
    "pax_2023-07-oldest": _pax,
    "alpa_intra": _alpa,
    "alpa_e2e": _alpa,
    "alpa_readme": _because(_NO_STAGES),
    "uva_single": _uva,
    "pax_llama2_7b_sft": _because(_NO_REMAT),
    "axlearn_fuji7b_v1": _because(_NO_REMAT),
    "axlearn_fuji7b_v2": _because(_NO_REMAT),
    "axlearn_fuji70b_v2": _because(_NO_REMAT),
    "pax_llama2_7b_lora32": _because("low-rank adapters, which we do not have"),
    "xla_pr45753": _because("its batch and its remat policy are not stated"),
    "t5x": _because("encoder and decoder: no model of ours"),
    "t5x_vit": _because("a classifier of images: no decoder of ours"),
    "marin_4312": _because("experts, which we do not have"),
}
