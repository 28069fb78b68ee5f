"""The Ultra-Scale Playbook's own runs on 8, 32 and 64 H100 as configs of ours.

The rows are those of the playbook's benchmark chart (huggingface.co/spaces/nanotron/ultrascale-playbook,
assets/data/benchmarks/banner.html, February 2025): one iteration each of nanotron on 8 H100 a host, sequences of 4096,
256 a batch.

Shapes, precision and the rest of the setup are those of nanotron's benchmark script (its branch nouamane/bench2:
scaling_benchmarks.py, examples/config_tiny_llama_bench.yaml): no grouped-query attention, a vocabulary of 131,072,
parameters in bfloat16 with float32 sums of gradients and masters, ZeRO 0 or 1, no recomputation, sequence parallelism
within the tensor split.

No recomputation is `selective` here, not `none`. nanotron keeps what the gradients of its kernels read
(src/nanotron/models/llama.py, flash-attn's layer_norm.py and flash_attn_interface.py): a norm's input, from which
Triton computes the normed value again, and its result; rotated queries and keys, values, attention's output and the log
of its denominator; gate, up and their product. `selective` keeps just these, 16h + 6f bytes a token and layer of width
h and MLP width f. nanotron has 20h + 8f: silu(gate) besides, and the storage of all three projections, since the
queries are a view of it. `none` is autodiff of every operation, 36h + 12f: six float32 tensors of the norms, three of
silu.

Stages are nanotron's 1F1B, a program for each: the last one alone has the head, whose vocabulary is a share of many
layers in small models, and the first holds most. Ours are one program, in which all stages share embedding and head.

What differs from our program: the order of nanotron's collectives and its buckets, unfused norms and gates, and the
slack of torch's allocator. Launches from Python are taken into account (`LAUNCH`), and the network is that of such
instances, measured by others.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from bytescope.train.plan.validation.measured_rows import MeasuredRow, facts, target

NAME = "playbook"
_SOURCE = "huggingface.co/spaces/nanotron/ultrascale-playbook assets/data/benchmarks/{} (2025-02)"
# Model -> layers, width, heads, width of the MLP, whether the embedding is tied to the head.
SHAPES = {
    "llama-1.34B": (16, 2048, 32, 8192, True),
    "llama-3.57B": (28, 3072, 32, 8192, True),
    "llama-8.86B": (32, 4096, 32, 14336, False),
    "llama-80B": (80, 8192, 64, 28672, False),
}
_SEQ_LEN, _VOCAB, _BATCH = 4096, 131072, 256
_PER_HOST = 8
# Tensor split -> seconds that a layer of one micro-batch, forward and backward, takes eager nanotron at least, whatever
# its size; no program of JAX has such a floor. In a host it is the launches: rows of little work on 8 GPUs take 4.3 to
# 4.6 ms. Over two and four hosts it is that of rows on 128 GPUs, which are not scored (1.34B to 80B, one sequence a
# micro-batch: 8.1 to 10.6 and 15.4 to 18.8 ms); ten collectives of 32 MiB explain 2.4 and 3.9 ms of it.
LAUNCH = {8: 4.4e-3, 16: 8.1e-3, 32: 15.4e-3}
# Launches bind a row that takes at most so many times that.
_FREE = 1.25
# What joins the hosts: the Playbook's cluster is of the instances that this network was measured on.
_NETWORK = "efa"
# A row that takes so many times the fastest one of its model, tensor split and micro-batch, on any number of GPUs.
_SLOW = 1.3
# Rows that took 1.9 to 4.9x the time of the same run with half the micro-batch, and reserved 10 to 51 GiB less than
# what the other half adds by nanotron's source.
_SQUEEZED = {"404", "450", "463", "464"}
# The policy that keeps what nanotron's autograd does.
_KEPT = "selective"
# MeasuredRow -> why its measured bytes are not compared.
_BYTES_DOUBTED = {
    "450": "25.6 GiB is less than the 60.7 that nanotron needs there by its source (what layers keep of 262,144 tokens "
    "48.0, logits 8.0, parameters and their state 4.6), and half of what half the micro-batch took"
}

Fact = Mapping[str, str]


@functools.cache
def rows() -> tuple[MeasuredRow, ...]:
    """Every row of the table, in its order; its id is its number."""
    return tuple(_row(number, fact) for number, fact in enumerate(facts(NAME)))


def _row(number: int, fact: Fact) -> MeasuredRow:
    gpus, reason = int(fact["gpus"]), _reason(fact)
    stages = int(fact["pp"])
    slots = SHAPES[fact["model"]][0] / stages * (int(fact["ga"]) + stages - 1)  # of a stage, its bubble included
    launch = next(seconds for split, seconds in LAUNCH.items() if int(fact["tp"]) <= split)
    return MeasuredRow(
        set=NAME,
        id=str(number),
        model=fact["model"],
        chip="h100",
        gpus=gpus,
        overrides=_overrides(fact),
        config="llama_8b",
        target=target("h100", gpus, _PER_HOST),
        measured_seconds=float(fact["elapsed_ms"]) / 1e3,
        measured_bytes=int(fact["peak_reserved_mib"]) << 20 if fact["peak_reserved_mib"] else None,
        quality="A",
        source=_SOURCE.format(fact["source"]),
        reason=reason,
        setup=_setup(fact),
        tensor=int(fact["tp"]),
        stages=stages,
        launch_seconds=launch * slots,
        host_bound=float(fact["ms_per_layer_per_slot"]) <= 1e3 * _FREE * launch,
        network=_NETWORK if gpus > _PER_HOST else "",
        differs=_differs(number, fact),
        bytes_are="reserved",
        bytes_reason=_BYTES_DOUBTED.get(f"{number}", ""),
    )


def _reason(fact: Fact) -> str:
    """Why a row is not compiled or not scored."""
    if fact["suspect"] == "1":
        return "suspect: runs that should take as long differ by 1.3x or more (network)"
    if int(fact["gbs_seqs"]) != _BATCH:
        return f"another batch than {_BATCH} sequences"
    return ""


def _differs(number: int, fact: Fact) -> str:
    """What is known of a run's memory, or of its network: the same slot (layers of one micro-batch) was faster
    elsewhere."""
    if f"{number}" in _SQUEEZED:
        return (
            "slower than with half the micro-batch, and less reserved than that adds: as where an allocator runs "
            "out of memory"
        )
    slower = float(fact["slot_ratio"] or 1.0)
    return f"a slot took {slower:.1f}x that of the same split on other GPUs: network" if slower >= _SLOW else ""


def _setup(fact: Fact) -> str:
    stages = f" pp{fact['pp']}" if fact["pp"] != "1" else ""
    return f"dp{fact['dp']} tp{fact['tp']}{stages} zero{fact['zero_stage']} {fact['mbs']}x{fact['ga']}"


def _overrides(fact: Fact) -> dict[str, str]:
    layers, width, heads, mlp, tied = SHAPES[fact["model"]]
    split = int(fact["tp"])
    return {
        "model.n_layers": f"{layers}",
        "model.d_model": f"{width}",
        "model.n_heads": f"{heads}",
        "model.n_kv_heads": f"{heads}",
        "model.d_head": f"{width // heads}",
        "model.d_ff": f"{mlp}",
        "model.vocab_size": f"{_VOCAB}",
        "model.tie_embeddings": f"{tied}",
        "model.rope_scaling": "()",
        "model.max_seq_len": f"{_SEQ_LEN}",
        "data.seq_len": f"{_SEQ_LEN}",
        "loss.kind": "full",
        "precision.preset": "fp32_grads",
        "remat.policy": _KEPT,
        "mesh.strategy": "zero1" if fact["zero_stage"] == "1" else "ddp",
        "mesh.tensor": f"{split}",
        "mesh.sequence_parallel": f"{split > 1}",
        "mesh.fsdp": fact["dp"],
        "batch.micro": fact["mbs"],
        "batch.accumulation": fact["ga"],
        "batch.mode": "scan",
        **_stages(fact["pp"]),
    }


def _stages(stages: str) -> dict[str, str]:
    return {"mesh.stage": stages, "pipeline.schedule": "1f1b"} if stages != "1" else {}
