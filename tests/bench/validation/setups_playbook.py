"""The published runs of nanotron for the Ultra-Scale Playbook on 8, 32 and 64 H100, as configs.

The rows are those of the playbook's benchmark chart (huggingface.co/spaces/nanotron/ultrascale-playbook,
assets/data/benchmarks/banner.html, February 2025). Each row is one iteration of nanotron with 8 H100 per host and 256
sequences of 4096 tokens per batch (four rows have 128 or 16).

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
one program, in which all stages share embedding and head. Where the difference matters by nanotron's source code
(`_other_program`), or where the measured seconds are unreliable (`MeasuredRow.unreliable`), the row has a prediction
that does not count in the scores (`MeasuredRow.claims_seconds`).

The rows of data/old_bench.csv are earlier runs of nanotron by the same people (July 2024, huggingface.co/nanotron
old_bench and bench_cluster), with 1,024 sequences of 4096 tokens per batch. They state the allocated and the reserved
peak. Shapes and setup are from the script that wrote their configs (github.com/huggingface/bench_cluster,
bench_cluster/create_configs.py and template/base_config.py): `llama-1B` with 24 layers, width 2048, an MLP of 4096,
the vocabulary of GPT-2 (50,257, padded to the tensor-parallel group), a tied embedding, ZeRO 1, and sequence
parallelism without asynchronous communication. Its nanotron (branch bench_cluster) saves the gathered inputs of
column-parallel linear layers, which later versions gather again.

In runs without stages, nanotron allocates bytes that our program does not have (nanotron_bytes.py). They are part of
the comparison of bytes.

The measured runs differ from our program in the order and buckets of nanotron's collectives, in unfused norms and
gates, and in the slack of torch's allocator. Kernel launches from Python are included in the prediction (`LAUNCH`).
The bandwidth between hosts was measured by others on the same type of cloud instance.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import nanotron_bytes
from measured_rows import MeasuredRow, facts, target
from nanotron_bytes import NanotronRun

NAME = "playbook"
# Layers, width, heads, width of the MLP, whether the embedding is tied to the head.
Shape = tuple[int, int, int, int, bool]
_SOURCE = "playbook: huggingface.co/spaces/nanotron/ultrascale-playbook assets/data/benchmarks/{} (2025-02)"
SHAPES: Mapping[str, Shape] = {
    "llama-1.34B": (16, 2048, 32, 8192, True),
    "llama-3.57B": (28, 3072, 32, 8192, True),
    "llama-8.86B": (32, 4096, 32, 14336, False),
    "llama-80B": (80, 8192, 64, 28672, False),
}
# The model of old_bench, `llama-1B` in its configs.
OLD_MODEL, OLD_SHAPE = "llama-1.11B", (24, 2048, 32, 4096, True)
_SEQ_LEN, _VOCAB, _OLD_VOCAB = 4096, 131072, 50257
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
# If the slowest stage has this multiple of the mean stage's work, a program whose stages share the head is another
# program: the factor is the end of the range in which a prediction counts as right.
_UNEVEN_FACTOR = 1.15
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
    """Returns all measurements of the Ultra-Scale Playbook, in the order of its table, then those of nanotron's earlier
    benchmark (old_bench.csv). The id of a measurement is its index in its table, such as "12", or "old12" for the
    earlier benchmark."""
    playbook = tuple(_row(number, fact) for number, fact in enumerate(facts(NAME)))
    return playbook + tuple(_old_row(number, fact) for number, fact in enumerate(facts("old_bench")))


def _row(number: int, fact: Fact) -> MeasuredRow:
    return _nanotron_row(
        f"{number}",
        fact,
        fact["model"],
        SHAPES[fact["model"]],
        _VOCAB,
        source=_SOURCE.format(fact["source"]),
        measured_bytes=int(fact["peak_reserved_mib"]) << 20 if fact["peak_reserved_mib"] else None,
        bytes_are="reserved",
        bytes_reason=_BYTES_DOUBTED.get(f"{number}", ""),
        differs=_likely_slowdown(number, fact),
        unreliable=(
            "runs that should take equally long differ by 1.3x or more (network)" if fact["suspect"] == "1" else ""
        ),
        published="2025-02",
    )


def _old_row(number: int, fact: Fact) -> MeasuredRow:
    unreliable = ""
    if fact["unsteady"] == "1":
        unreliable = "unsteady: the fastest step took less than a third of the median step"
    elif int(fact["gpus"]) > 16:
        unreliable = "unsteady: the steps of old_bench on more than 16 GPUs"
    split = int(fact["tp"])
    return _nanotron_row(
        f"old{number}",
        fact,
        OLD_MODEL,
        OLD_SHAPE,
        -(-_OLD_VOCAB // split) * split,
        source=f"old_bench: huggingface.co/nanotron/{fact['source']} (2024-07)",
        measured_bytes=int(float(fact["peak_allocated_mib"]) * 2**20),
        bytes_are="allocated",
        differs="torch's profiler was probably on (bench_cluster/template/base_config.py)",
        unreliable=unreliable,
        published="2024-07",
    )


def _nanotron_row(key: str, fact: Fact, model: str, shape: Shape, vocab: int, **more: Any) -> MeasuredRow:
    gpus, stages, split = int(fact["gpus"]), int(fact["pp"]), int(fact["tp"])
    slots = shape[0] / stages * (int(fact["ga"]) + stages - 1)  # layers per stage, with the bubble
    launch = next(seconds for size, seconds in LAUNCH.items() if split <= size)
    return MeasuredRow(
        set=NAME,
        id=key,
        model=model,
        chip="h100",
        gpus=gpus,
        overrides=_overrides(fact, shape, vocab),
        config="llama_8b",
        target=target("h100", gpus, _PER_HOST),
        measured_seconds=float(fact["elapsed_ms"]) / 1e3,
        quality="A",
        setup=_setup(fact),
        tensor=split,
        stages=stages,
        launch_seconds=launch * slots,
        host_bound=float(fact["ms_per_layer_per_slot"]) <= 1e3 * _MAX_LAUNCH_FACTOR * launch,
        network=_NETWORK if gpus > _PER_HOST else "",
        framework_bytes=_framework_bytes(fact, shape, vocab, asynchronous=more["bytes_are"] == "reserved"),
        attention=_ATTENTION,
        framework="eager torch",
        other_program=_other_program(stages, split, gpus, shape, vocab),
        **more,
    )


def nanotron_run(fact: Fact, shape: Shape, vocab: int, asynchronous: bool) -> NanotronRun:
    """Returns the facts of a run without stages that decide nanotron's bytes.

    Args:
        fact: the row of the table, column -> text.
        shape: layers, width, heads, width of the MLP, whether the embedding is tied to the head.
        vocab: size of the vocabulary.
        asynchronous: True for the nanotron of the Playbook's runs, False for that of old_bench.
    """
    data, split, zero, micro = (int(fact[name]) for name in ("dp", "tp", "zero_stage", "mbs"))
    return NanotronRun(*shape, vocab, data, split, zero, micro, asynchronous)


def _framework_bytes(fact: Fact, shape: Shape, vocab: int, asynchronous: bool) -> dict[str, int]:
    if fact["pp"] != "1":
        return {}
    run = nanotron_run(fact, shape, vocab, asynchronous)
    return {term.name: term.bytes for term in nanotron_bytes.terms(run) if not term.ours}


def _other_program(stages: int, split: int, gpus: int, shape: Shape, vocab: int) -> str:
    if stages == 1:
        return ""
    # Stages are the outermost axis of nanotron's ranks (src/nanotron/parallel/context.py), so that they are on several
    # hosts. The shapes are sent by src/nanotron/parallel/pipeline_parallel/p2p.py, `_send_meta` and `_recv_meta`.
    if split > 1 and gpus > _PER_HOST:
        return (
            "between pipeline stages on several hosts, each process of nanotron's tensor-parallel group receives the "
            "shape of each tensor ahead, and its host waits for it before it launches more kernels; our stages are "
            "one compiled program"
        )
    uneven = slowest_stage(stages, shape, vocab)
    if uneven > _UNEVEN_FACTOR:
        return (
            "only nanotron's last pipeline stage has the head, so that the slowest stage has more than "
            f"{_UNEVEN_FACTOR} times the work of the mean stage; our stages share the head"
        )
    return ""


def slowest_stage(stages: int, shape: Shape, vocab: int) -> float:
    """Returns the work of nanotron's slowest pipeline stage, divided by the work of the mean stage.

    nanotron assigns whole layers and the head to stages in their order, and goes to the next stage when the work so far
    exceeds the stage's share (src/nanotron/models/base.py, `build_model`). The work of a layer and of the head is their
    number of weights (src/nanotron/models/llama.py, `get_block_compute_costs`).

    Args:
        stages: number of pipeline stages.
        shape: layers, width, heads, width of the MLP, whether the embedding is tied to the head.
        vocab: size of the vocabulary.
    """
    layers, width, _, mlp, _ = shape
    costs = [4 * width * width + 3 * mlp * width] * layers + [vocab * width]
    total, done, stage, work = sum(costs), 0, 0, [0] * stages
    for cost in costs:
        work[stage] += cost
        done += cost
        if done * stages > total * (stage + 1):
            stage += 1
    return max(work) * stages / total


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
    return (
        f"a layer took {slower:.1f}x as long as with a tensor-parallel group of this size on other numbers of GPUs, "
        "probably because of the network"
    )


def _setup(fact: Fact) -> str:
    stages = f" pp{fact['pp']}" if fact["pp"] != "1" else ""
    return f"dp{fact['dp']} tp{fact['tp']}{stages} zero{fact['zero_stage']} {fact['mbs']}x{fact['ga']}"


def _overrides(fact: Fact, shape: Shape, vocab: int) -> dict[str, str]:
    layers, width, heads, mlp, tied = shape
    split = int(fact["tp"])
    return {
        "model.n_layers": f"{layers}",
        "model.d_model": f"{width}",
        "model.n_heads": f"{heads}",
        "model.n_kv_heads": f"{heads}",
        "model.d_head": f"{width // heads}",
        "model.d_ff": f"{mlp}",
        "model.vocab_size": f"{vocab}",
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
