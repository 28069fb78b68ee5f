"""Rows of a comparison, and reports, by hand, with figures that hang together."""

import dataclasses
import random

from bytescope.memory.records.report_record import (
    ROWS,
    Buffer,
    Finding,
    LedgerRow,
    ReportRecord,
    TimelinePoint,
    XlaStats,
)
from bytescope.train.plan.config_grid import ConfigRow as Row

MIB, GIB = 2**20, 2**30
PHASES = ("forward", "recompute", "backward", "optimizer")


def row(policy="none", gib=10.0, share=0.0, limit=40, **more):
    """A row that compiled, with figures that hang together."""
    size = int(gib * GIB)
    overrides = {"remat.policy": policy, **more.pop("keys", {})}
    breakdown = {"params": size // 2, "residuals": size - size // 2}
    return Row(
        overrides,
        peak_bytes=size,
        allocated_bytes=size,
        temp_bytes=size // 2,
        host_bytes=0,
        residual_bytes=size - size // 2,
        recompute_flops_fraction=share,
        kernel_recompute_flops=0.0,
        model_flops=6e12,
        hardware_flops=6e12 * (1 + share),
        compile_seconds=3.0,
        breakdown=breakdown,
        limit_bytes=limit * GIB,
        fits=size <= limit * GIB,
        **more,
    )


def some_rows():
    """Three on the front, one behind it, one that failed."""
    return [
        row("none", 60),
        row("dots", 30, 0.05),
        row("worse", 35, 0.06),
        row("full", 12, 1 / 3),
        Row({"remat.policy": "ful"}, status="remat.policy='ful': choose another"),
    ]


def make_report(points=120, buffers=300, seed=0):
    """A report of random buffers whose figures agree with each other, as the analysis makes them."""
    rng = random.Random(seed)
    found = [
        Buffer(
            f"params['w{i}']",
            64 * MIB,
            (64, 4096),
            "bf16",
            "params",
            "argument",
            "mlp",
            "blocks/mlp",
            start=0,
            end=points - 1,
        )
        for i in range(4)
    ]
    for i in range(buffers):
        start = rng.randrange(points)
        found.append(
            Buffer(
                name=f"fusion.{i}",
                bytes=rng.randrange(1, 40 * MIB),
                shape=(8, rng.randrange(1, 4096)),
                dtype="f32",
                category=rng.choice(["residuals", "workspace", "gradients", "logits_loss"]),
                phase=PHASES[4 * start // points],
                component=rng.choice(["attention", "mlp", ""]),
                module="blocks/attention",
                op_name="jit(step)/jvp/softmax",
                source=f"model/block.py:{i}",
                checkpoint_name=rng.choice(["qkv", ""]),
                start=start,
                end=min(points - 1, start + rng.randrange(30)),
            )
        )
    live = [sum(b.bytes for b in found if b.start <= i <= b.end) for i in range(points)]
    peak = max(range(points), key=live.__getitem__)
    found = [dataclasses.replace(b, at_peak=b.start <= peak <= b.end) for b in found]
    breakdown = dict.fromkeys(ROWS, 0) | {"fragmentation": 7 * MIB}
    for buffer in found:
        breakdown[buffer.category] += buffer.bytes * buffer.at_peak
    return ReportRecord(
        peak_bytes=live[peak],
        allocated_bytes=live[peak] + 7 * MIB,
        breakdown=breakdown,
        peak_index=peak,
        timeline=tuple(TimelinePoint(i, live[i], PHASES[4 * i // points], f"op.{i}") for i in range(points)),
        buffers=(*found, Buffer("on the host", MIB, memory="host")),
        program="jit_train_step",
        ledger=(LedgerRow("params", "bf16", 100, 200, 2.0), LedgerRow("total", "", 100, 200, 2.0)),
        findings=(Finding("full_logits", MIB, "the logits are alive", "chunk the loss", "--config.loss.kind=chunked"),),
        residuals_by_name={"qkv": 3 * MIB, "": MIB},
        workspace_by_scope={"backward/mlp": MIB},
        xla=XlaStats(temp_bytes=5 * MIB),
        limit_bytes=2 * live[peak],
        fits=True,
        verdict="fits",
        versions={"jax": "9.9.9"},
        target={"name": "h200:8", "kind": "NVIDIA H200", "platform": "cuda"},
        config={"model": {"layers": 2}, "mesh": [1, 8]},
        notes=("a note",),
    )
