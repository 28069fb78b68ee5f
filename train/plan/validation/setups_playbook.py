"""The published runs of the Ultra-Scale Playbook on 8, 32 and 64 H100, as configs.

The rows are those of the playbook's benchmark chart (huggingface.co/spaces/nanotron/ultrascale-playbook,
assets/data/benchmarks/banner.html, February 2025). Each row is one iteration of nanotron with 8 H100 per host, 256
sequences of 4096 tokens per batch.

Shapes, precision and the rest of the setup are from nanotron's benchmark script (branch nouamane/bench2:
scaling_benchmarks.py, examples/config_tiny_llama_bench.yaml): no grouped-query attention, a vocabulary of 131,072,
parameters in bfloat16 with float32 gradient sums and master parameters, ZeRO 0 or 1, no recomputation, and sequence
parallelism within the tensor-parallel group.

"No recomputation" corresponds to `remat.policy=selective`, not to `none`. nanotron saves what the backward passes of
its kernels read (src/nanotron/models/llama.py, flash-attn's layer_norm.py and flash_attn_interface.py): the input of a
norm, from which a Triton kernel computes the normalized value again, and its result; the rotated queries and keys, the
values, the output of attention and the log of its softmax denominator; gate, up and their product. `selective` saves
the same tensors: 16h + 6f bytes per token and layer of width h and MLP width f. nanotron has 20h + 8f: it also saves
silu(gate), and the storage of all three projections, because the queries are a view of it. `none` saves the residuals
of every operation, 36h + 12f, including six float32 tensors of the norms and three of silu.

Pipeline stages run nanotron's 1F1B schedule, with one program per stage: only the last stage has the head, whose
vocabulary costs as much as many layers of a small model, and the first stage stores most activations. Our stages run
one program, in which all stages share embedding and head.

The measured runs differ from our program in the order and buckets of nanotron's collectives, in unfused norms and
gates, and in the slack of torch's allocator. Kernel launches from Python are included in the prediction (`LAUNCH`).
The bandwidth between hosts was measured by others on the same type of cloud instance.
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
# Size of the tensor-parallel group -> minimum seconds that eager nanotron needs for one layer of one micro-batch,
# forward and backward, whatever its size. Programs of JAX have no such minimum. Within a host it is the time of kernel
# launches: small rows on 8 GPUs take 4.3 to 4.6 ms. Over two and four hosts it is read from rows on 128 GPUs, which are
# not scored (1.34B to 80B, one sequence per micro-batch: 8.1 to 10.6 and 15.4 to 18.8 ms). Ten collectives of 32 MiB
# explain 2.4 and 3.9 ms of it.
LAUNCH = {8: 4.4e-3, 16: 8.1e-3, 32: 15.4e-3}
# A row is bound by launches if it takes at most this multiple of the launch time.
_MAX_LAUNCH_FACTOR = 1.25
# The network between hosts: the Playbook's cluster consists of the instances on which this network was measured.
_NETWORK = "efa"
# A row is slow if it takes this multiple of the fastest row with its model, tensor-parallel group and micro-batch, on
# any number of GPUs.
_SLOW_FACTOR = 1.3
# Rows that took 1.9 to 4.9 times the seconds of the same run with half the micro-batch, and reserved 10 to 51 GiB less
# than the second half of the micro-batch needs by nanotron's source code.
_OUT_OF_MEMORY_ROWS = {"404", "450", "463", "464"}
# nanotron calls flash-attention's `flash_attn_varlen_func` (src/nanotron/models/llama.py) and requires flash-attn 2.5
# or 2.6 (pyproject.toml, January 2025).
_ATTENTION = "flash-attention-2"
# The remat policy that saves the same tensors as nanotron's autograd.
_POLICY = "selective"
# Id of a row -> why its measured bytes are not compared with our prediction.
_BYTES_DOUBTED = {
    "450": "25.6 GiB is less than the 60.7 GiB that nanotron needs by its source code (activations of 262,144 tokens "
    "48.0, logits 8.0, parameters and their state 4.6), and half of the bytes of half the micro-batch"
}

Fact = Mapping[str, str]


@functools.cache
def rows() -> tuple[MeasuredRow, ...]:
    """Returns all measurements of the Ultra-Scale Playbook, in the order of its table. The id of a measurement is its
    index."""
    return tuple(_row(number, fact) for number, fact in enumerate(facts(NAME)))


def _row(number: int, fact: Fact) -> MeasuredRow:
    gpus, reason = int(fact["gpus"]), _reason_to_exclude(fact)
    stages = int(fact["pp"])
    slots = SHAPES[fact["model"]][0] / stages * (int(fact["ga"]) + stages - 1)  # layers per stage, with the bubble
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
        host_bound=float(fact["ms_per_layer_per_slot"]) <= 1e3 * _MAX_LAUNCH_FACTOR * launch,
        network=_NETWORK if gpus > _PER_HOST else "",
        attention=_ATTENTION,
        differs=_likely_slowdown(number, fact),
        bytes_are="reserved",
        framework="eager torch",
        published="2025-02",
        bytes_reason=_BYTES_DOUBTED.get(f"{number}", ""),
    )


def _reason_to_exclude(fact: Fact) -> str:
    if fact["suspect"] == "1":
        return "suspect: runs that should take equally long differ by 1.3x or more (network)"
    if int(fact["gbs_seqs"]) != _BATCH:
        return f"the batch is not {_BATCH} sequences"
    return ""


def _likely_slowdown(number: int, fact: Fact) -> str:
    # Inferred from other runs that did the same work in less time.
    if f"{number}" in _OUT_OF_MEMORY_ROWS:
        return (
            "slower than with half the micro-batch, with less reserved memory than the other half needs: probably "
            "the allocator ran out of memory"
        )
    slower = float(fact["slot_ratio"] or 1.0)
    if slower < _SLOW_FACTOR:
        return ""
    return f"a layer took {slower:.1f}x as long as with the same tensor-parallel group on other GPUs: network"


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
        "remat.policy": _POLICY,
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
