"""Published measurements of JAX on GPUs and TPUs, each with the config that comes nearest to the measured program.

The rows are those of `data/jax.csv`; the id of a row is its index. Facts that a table does not state were read in the
code and the launch scripts of its project, which the functions below name. In addition, the measured programs have in
common with ours float32 master parameters and moments, 16-bit matmuls and gradients, logits in one array, and AdamW.
They differ from ours in two ways: XLA is as old as the run, and the schedules of dgxc were guided by a profile.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

from measured_rows import (
    NO_TRANSFORMER,
    Fact,
    MeasuredRow,
    Setup,
    facts,
    reason_not_compared,
    row_of,
    shape,
)

NAME = "jax"
# The first of these words that the column `gpu` contains -> (chip, devices per host).
_CHIPS = {
    "GB200": ("", 4),
    "B200": ("b200", 8),
    "H200": ("h200", 8),
    "H100": ("h100", 8),
    "A100": ("a100-80g", 8),
    "V100": ("v100", 8),
    "A5000": ("a5000", 8),
    "v6e": ("v6e", 8),
}


# Source -> year and month of its publication: the commit that added the figures, the release, or the issue.
PUBLISHED: Mapping[str, str] = {
    "algoperf_pr892": "2026-01",
    "alpa_e2e": "2022-04",
    "alpa_intra": "2022-04",
    "alpa_readme": "2022-03",
    "axlearn_fuji70b_v2": "2024-06",
    "axlearn_fuji7b_v1": "2024-04",
    "axlearn_fuji7b_v2": "2024-09",
    "axlearn_paper": "2025-07",
    "axlearn_pr1171": "2025-05",
    "dgxc_l2_70b": "2025-04",
    "dgxc_l2_70b_old": "2024-11",
    "gpurecipes_b200_405b": "2025-03",
    "gpurecipes_b200_70b": "2025-03",
    "gpurecipes_h200_405b_fp8": "2025-03",
    "gpurecipes_h200_70b": "2025-03",
    "jax_14056": "2023-01",
    "jax_23869": "2024-09",
    "jaxtoolbox_maxtext": "2024-05",
    "marin_4312": "2026-06",
    "marin_6304": "2026-06",
    "marin_8053": "2026-08",
    "marin_d12_logbook": "2026-06",
    "maxtext_a3_l2_7b": "2024-04",
    "pax_2023-07-oldest": "2023-07",
    "pax_2023-08": "2023-08",
    "pax_2024-04": "2024-06",
    "pax_llama2_7b_lora32": "2024-06",
    "pax_llama2_7b_sft": "2024-06",
    "t5x": "2023-06",
    "t5x_vit": "2023-08",
    "tpurecipes_v6e": "2025-07",
    "uva_single": "2024-03",
    "xla_pr45753": "2026-07",
}
# Sources whose later release was measured too.
OLDER = ("pax_2023-08", "pax_2023-07-oldest", "dgxc_l2_70b_old")
# Likely reason for a difference between prediction and measurement -> whether the reason applies to a row and its chip.
DIFFERS: Mapping[str, Callable[[Fact, str], bool]] = {
    "an older release, which was up to 1.6 times slower than the next one": lambda fact, chip: (
        fact["source_id"] in OLDER
    ),
    "our program is the same with and without Transformer Engine, because attention is unfused in both": (
        lambda fact, chip: fact["model"] == "gpt-126m"
    ),
    "network: replicas over hosts of GCP's A3, whose links (GPUDirect-TCPX) none of our sources "
    "measured": lambda fact, chip: fact["source_id"] == "maxtext_a3_l2_7b" and int(fact["n_gpus"]) > 8,
    "in bfloat16 with full recomputation the run would have reached about 80 % of the data sheet's FLOP/s; it "
    "probably recomputed less, or used fp8": lambda fact, chip: chip == "b200",
    "a TPU: no rate was measured on it; all efficiencies are those of H100": lambda fact, chip: chip == "v6e",
    "an A5000 in a notebook: its clock rate and most other rates are taken from other chips": lambda fact, chip: (
        chip == "a5000"
    ),
}


@functools.cache
def rows() -> tuple[MeasuredRow, ...]:
    """Returns the published measurements of JAX projects (table data/jax.csv), in the order of the table."""
    return tuple(_row(number, fact) for number, fact in enumerate(facts(NAME)))


def _row(number: int, fact: Fact) -> MeasuredRow:
    chip, per_host = next((entry for word, entry in _CHIPS.items() if word in fact["gpu"]), ("", 8))
    gpus = int(fact["n_gpus"] or 0)
    unknown = _because("the model is not a decoder that a config can describe")
    nearest = reason_not_compared(fact) or SETUPS.get(fact["source_id"], unknown)(fact)
    return row_of(
        NAME,
        number,
        fact,
        nearest,
        chip,
        gpus,
        per_host,
        setup=" ".join(filter(None, (fact["precision"], fact["parallelism"], fact["remat"]))),
        tensor=int("1" if isinstance(nearest, str) else nearest[1].get("mesh.tensor", "1")),
        stages=int("1" if isinstance(nearest, str) else nearest[1].get("mesh.stage", "1")),
        bytes_are="allocated" if fact["mem_gib"] else "",
        bytes_reason=BYTES.get(fact["source_id"], _no_reason)(fact) if fact["mem_gib"] else "",
        cohort=f"{fact['quality']}, {'older' if fact['source_id'] in OLDER else 'newest'}",
        differs=_find_known_difference(fact, chip),
        published=PUBLISHED[fact["source_id"]],
        network="efa" if "p5.48xlarge" in fact["gpu"] else "",  # links between hosts of this instance
        other_program=OTHER_PROGRAM.get(fact["source_id"], _no_reason)(fact),
    )


def _find_known_difference(fact: Fact, chip: str) -> str:
    return next((why for why, holds in DIFFERS.items() if holds(fact, chip)), "")


def _maxtext_7b(fact: Fact) -> Setup:
    # As run by the scripts of JAX-Toolbox and GCP: layers are unrolled, and parameters are sharded within a host, with
    # one replica per host. The policies `minimal_flash` and `minimal_with_context` save the outputs of matmuls with
    # weights and the output of attention (MaxText, layers/decoders.py).
    return "llama_8b", shape(fact) | {
        "remat.policy": "minimal",
        "model.scan": "False",
        "xla.latency_hiding": "on",
        "mesh.fsdp": "8",
        "mesh.data": f"{int(fact['n_gpus']) // 8}",
    }


# MaxText's remat policy (layers/decoders.py) -> our names of the tensors that it saves. MaxText names queries and keys
# after the rotation.
_PROJECTIONS = "'q_rot','k_rot','v','attn_out'"
_SAVED = {
    "save_dot_except_mlpwi": f"({_PROJECTIONS},'mlp_out')",
    "save_dot_except_mlp": f"({_PROJECTIONS})",
    "save_dot_with_context_except_mlp": f"({_PROJECTIONS},'context')",
}


def _maxtext_70b(fact: Fact) -> Setup:
    # As run by dgxc-benchmarking (maxtext/configure.sh, README_70b.md) or gpu-recipes: layers are scanned. XLA gathers
    # the parameters of a layer while the layer before it computes, as `mesh.prefetch` does.
    replicas = next((part.removeprefix("dcn_dp") for part in fact["parallelism"].split(" x ") if "dcn_dp" in part), "1")
    policy = fact["remat"].partition(":")[0].split()[-1:]
    if not policy or policy[0] not in _SAVED:
        return _NO_REMAT
    return "llama_8b", shape(fact) | {
        "remat.policy": "custom",
        "remat.save": _SAVED[policy[0]],
        "xla.latency_hiding": "on",
        "mesh.prefetch": "1",
        "mesh.data": replicas,
        "mesh.fsdp": "-1",
    }


def _maxtext_b200(fact: Fact) -> Setup:
    # As run by gpu-recipes: fully sharded, with scanned and recomputed layers.
    return "llama_8b", shape(fact) | {"remat.policy": "full", "xla.latency_hiding": "on", "mesh.prefetch": "1"}


# Remat policies of Pax (paxml/contrib/gpu/scripts_gpu/configs.py). The layers of 126M are not repeated, and Pax
# checkpoints only repeated layers. Only GPT5B sets SAVE_DOT_WITH_NO_BATCH_DIM. GPT175B is derived from 126M and has the
# default of tasks/lm/model_params.py, SAVE_NOTHING. The policy that the table states for GPT175B is wrong: it would
# need 264 GiB on a device.
_PAX_REMAT = {"gpt-126m": "none", "gpt-5b": "dots_no_batch", "gpt-175b": "full"}
_PAX_126M = {"mesh.strategy": "ddp", "model.scan": "False", "model.unroll": "1", "model.attention": "naive"}


def _pax(fact: Fact) -> Setup:
    # Attention is unfused in runs without Transformer Engine, and in the runs of the 126M model, which the table calls
    # unfused.
    if "tp2" in fact["parallelism"]:
        return "the batch per tensor-parallel group is not stated"
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
# Alpa's solver may replace the all-reduce of gradients by reduce-scatter and all-gather, which is ZeRO-2.
_ALPA_STRATEGY = {
    "data_parallel": "ddp",
    "zero_2": "zero2",
    "zero_3": "zero3",
    "auto_sharding": "zero2",
    "intra_only": "zero2",
    "heuristic": "zero3",
}


def _alpa(fact: Fact) -> Setup:
    # Alpa's GPT (benchmark/alpa/benchmark_one_case_gpt_bert.py): parameters, gradients and logits are float16 with
    # float32 master parameters. AdamW has no clipping and no loss scale, and the head has its own matrix. On a mesh A x
    # B, A devices are data-parallel and B are tensor-parallel.
    kind, _, mesh = fact["parallelism"].partition(" mesh ")
    if "wresnet" in fact["model"]:
        return NO_TRANSFORMER
    if kind not in _ALPA_STRATEGY:
        return _NO_BATCH
    # Of several meshes, only the fastest run is in the table; ours is the first.
    data, tensor = (int(size) for size in re.findall(r"\d+", mesh)[:2])
    accumulation = int(fact["ga"])
    common = _ALPA | {
        "batch.micro": f"{int(fact['gbs']) // accumulation // data}",
        "batch.accumulation": f"{accumulation}",
        "mesh.strategy": _ALPA_STRATEGY[kind] if fact["n_gpus"] != "1" else "ddp",
        "mesh.fsdp": f"{data}",
        "mesh.tensor": f"{tensor}",
    }
    if "moe" not in fact["model"]:
        return "gpt2_small", shape(fact) | common
    # alpa/model/moe.py: every other layer has experts, of which a token uses two; both kinds of MLP are eight times as
    # wide as the model; an expert takes at most as many tokens as it gets on average. Without forced data parallelism
    # the solver shards experts over the data-parallel devices, and moves tokens with all-to-alls.
    experts = _ALPA_EXPERTS.get(fact["model"]) or int(fact["model"].partition("-E")[2])
    shards = data if kind in ("auto_sharding", "intra_only") else 1
    wide = dict(fact) | {"ffn": f"{8 * int(fact['hidden'])}", "kv": fact["heads"]}
    return "gpt2_small", shape(wide) | common | {
        "model.bias": "False",  # ours has no biases in experts; Alpa's have none either
        "model.experts": f"{experts}",
        "model.experts_per_token": "2",
        "model.moe_every": "2",
        "model.moe_kernel": "capacity",
        "model.capacity_factor": "1.0",
        "mesh.expert": f"{shards}",
        "mesh.fsdp": f"{data // shards}",
    }


# Experts of Alpa's models (benchmark/alpa/suite_paper_manual_moe.py).
_ALPA_EXPERTS = {"moe-380M": 8, "moe-690M": 16, "moe-1.3B": 16, "moe-2.4B": 16, "moe-10B": 32}


def _alpa_readme(fact: Fact) -> Setup:
    # benchmark/alpa/README.md: the settings of the GPT above, with two data-parallel, two tensor-parallel and two
    # pipeline-parallel devices.
    return "gpt2_small", shape(fact) | _ALPA | {
        "batch.micro": f"{int(fact['gbs']) // int(fact['ga']) // 2}",
        "batch.accumulation": fact["ga"],
        "mesh.strategy": "zero2",
        "mesh.fsdp": "2",
        "mesh.tensor": "2",
        "model.scan": "True",
        "mesh.stage": "2",
        "pipeline.schedule": "1f1b",
    }


def _why_alpa_is_another_program(fact: Fact) -> str:
    if "|" in fact["parallelism"]:
        return "one of several meshes, which is not stated"
    if "heuristic" in fact["parallelism"] and fact["n_gpus"] != "1":
        return "a heuristic shards the largest dimension of every array, activations included; ours shards parameters"
    if "moe" in fact["model"]:
        return "one-hot matrix products move tokens to their experts (GShard); ours gathers rows by their index"
    if "pp2" in fact["parallelism"]:
        return "1F1B with one program per stage, whose last stage alone has the head"
    return ""


def _why_alpa_bytes_differ(fact: Fact) -> str:
    # With data parallelism, Alpa combines collectives without a size limit (alpa/global_env.py: all_reduce_threshold of
    # 1 << 60). So all float16 gradients exist until one combined reduction, in addition to float16 parameters that are
    # part of Alpa's state. Our program reduces each gradient when it is computed, and frees a layer's copy of its
    # parameters after the layer's backward pass.
    data = fact["parallelism"].rpartition(" mesh ")[2].split("x")[0]
    return "" if data == "1" else _WHOLE_GRADIENTS


def _pax_llama(fact: Fact) -> Setup:
    # Pax' LLaMA7B (paxml/contrib/gpu/scripts_gpu/configs.py, llama_utils.py, run_llama_boolq.sh): layers are not
    # repeated, so none is recomputed; parameters are float32; the container of 2024-04 has flash attention by default.
    # Adapters of rank 32 are on all matrices of the blocks; ours stores the frozen parameters in bfloat16.
    adapters = {"lora.rank": "32"} if fact["source_id"] == "pax_llama2_7b_lora32" else {}
    return "llama_8b", shape(fact) | adapters | {
        "remat.policy": "none",
        "model.scan": "False",
        "model.unroll": "1",
        "xla.latency_hiding": "on",
    }


# MaxText's names of tensors that are moved to host memory -> ours.
_OFFLOADED = {
    "decoder_layer_input": "block_in",
    "query_proj": "q_rot",
    "key_proj": "k_rot",
    "value_proj": "v",
    "out_proj": "attn_out",
}
# More TPU chips are not compiled, because their compile time is too long.
_MAX_TPU_CHIPS = 32


def _tpu_recipe(fact: Fact) -> Setup:
    # As run by tpu-recipes (MaxText, benchmarks/maxtext_trillium_model_configs.py): fully sharded and scanned layers,
    # of which the named tensors are in host memory until the backward pass and all others are recomputed. Logits are
    # stored in bfloat16 (configs/base.yml: logits_dot_in_fp32 is false).
    if int(fact["n_gpus"]) > _MAX_TPU_CHIPS:
        return f"more than {_MAX_TPU_CHIPS} TPU chips; smaller slices with the same model are compared"
    names = ",".join(f"'{_OFFLOADED[name]}'" for name in fact["remat"].split()[1:])
    return "llama_8b", shape(fact) | {
        "remat.policy": "custom",
        "remat.offload": f"({names})",
        "precision.logits": "bfloat16",
    }


def _axlearn(fact: Fact) -> Setup:
    # axlearn's Fuji (axlearn/experiments/text/gpt/fuji.py of 2024-09; attention.py, build_remat_spec): layers are
    # repeated, and save queries and keys after their rotation, values, the output of attention and its projection. It
    # is not stated whether attention was fused: it is in ours.
    shards, replicas = (int(size) for size in re.findall(r"\d+", fact["parallelism"]))
    stated = dict(fact) | {"bs_per_gpu": f"{int(fact['gbs']) // int(fact['n_gpus'])}"}
    return "llama_8b", shape(stated) | {
        "remat.policy": "custom",
        "remat.save": f"({_PROJECTIONS},'context')",
        "xla.latency_hiding": "on",
        "mesh.fsdp": f"{shards}",
        "mesh.data": f"{replicas}",
    }


def _marin(fact: Fact) -> Setup:
    # Marin's Grug, May Recipe (github.com/marin-community/marin, issue 6044): head dimension 128, a shared expert of
    # twice the width of a routed one, routed weights that sum to 2.5. Experts are sharded over the GPUs of a host.
    stated = dict(fact) | {"heads": "20", "kv": "5", "ffn": "1280", "vocab": "128256", "seq": "4096"}
    return "llama_8b", shape(stated) | {
        "model.experts": "256",
        "model.experts_per_token": "4",
        "model.d_expert": "1280",
        "model.shared_experts": "2",
        "model.router": "sigmoid",
        "model.router_scale": "2.5",
        "model.router_bias": "True",
        "optimizer.name": "muon",
        "optimizer.clip_norm": "0.0",
        "remat.policy": "full",
        "xla.latency_hiding": "on",
        "mesh.expert": "8",
        "mesh.fsdp": "-1",
    }


def _why_marin_is_another_program(fact: Fact) -> str:
    del fact
    return "gates on norms and attention, values subtracted from the output of attention, and the optimizer MuonH"


def _uva(fact: Fact) -> Setup:
    # UvA's tutorial (single_gpu_transformer): dropout 0.1, unfused attention, biases, and Adam without clipping.
    # "MLP,Attn" checkpoints both halves of a block. The tutorial also normalizes queries and keys, which our config
    # does not.
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


def _why_uva_bytes_differ(fact: Fact) -> str:
    if fact["gbs"] != "256":
        return ""
    return (
        "the stated micro-batch of 64 sequences cannot be right: by the other rows, which take 3.9 GiB with 16 "
        "sequences and 6.2 GiB with 64, its 15.0 GiB correspond to about 250 sequences"
    )


_NO_REMAT, _NO_BATCH = "its remat policy is not stated", "the number of micro-batches is not stated"
_WHOLE_GRADIENTS = (
    "Alpa keeps all gradients in memory for one combined reduction; our program reduces each gradient when it is "
    "computed"
)


def _because(reason: str) -> Callable[[Fact], Setup]:
    return lambda _: reason


def _no_reason(fact: Fact) -> str:
    del fact
    return ""


# Source -> the function that returns why the bytes of a row are not compared; "" if they are.
BYTES: Mapping[str, Callable[[Fact], str]] = {"alpa_intra": _why_alpa_bytes_differ, "uva_single": _why_uva_bytes_differ}
# Source -> the function that returns why a measured program is known to be another program than ours; "" if it is not.
OTHER_PROGRAM: Mapping[str, Callable[[Fact], str]] = {
    "alpa_e2e": _why_alpa_is_another_program,
    "alpa_intra": _why_alpa_is_another_program,
    "alpa_readme": _why_alpa_is_another_program,
    "marin_4312": _why_marin_is_another_program,
}
# Source -> the function that returns the config of a row, or the reason why there is none.
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
    "alpa_readme": _alpa_readme,
    "uva_single": _uva,
    "tpurecipes_v6e": _tpu_recipe,
    "pax_llama2_7b_sft": _pax_llama,
    "axlearn_fuji7b_v1": _axlearn,
    "axlearn_fuji7b_v2": _axlearn,
    "axlearn_fuji70b_v2": _axlearn,
    "pax_llama2_7b_lora32": _pax_llama,
    "xla_pr45753": _because("its batch and its remat policy are not stated"),
    "t5x": _because("the model has an encoder and a decoder, which no config describes"),
    "t5x_vit": _because(NO_TRANSFORMER),
    "marin_4312": _marin,
}
