"""Reports by hand whose figures agree with each other."""

import dataclasses
import random

from bytescope.memory.records import ROWS, Buffer, Finding, LedgerRow, Report, TimelinePoint, XlaStats

MIB = 2**20
PHASES = ("forward", "recompute", "backward", "optimizer")


def make_report(points=120, buffers=300, seed=0):
    """A report of random buffers whose figures agree with each other, as the analysis makes them."""
    rng = random.Random(seed)
    found = [Buffer(f"params['w{i}']", 64 * MIB, (64, 4096), "bf16", "params", "argument", "mlp",
                    "blocks/mlp", start=0, end=points - 1) for i in range(4)]
    for i in range(buffers):
        start = rng.randrange(points)
        found.append(Buffer(
            name=f"fusion.{i}", bytes=rng.randrange(1, 40 * MIB), shape=(8, rng.randrange(1, 4096)),
            dtype="f32", category=rng.choice(["residuals", "workspace", "gradients", "logits_loss"]),
            phase=PHASES[4 * start // points], component=rng.choice(["attention", "mlp", ""]),
            module="blocks/attention", op_name="jit(step)/jvp/softmax", source=f"model/block.py:{i}",
            checkpoint_name=rng.choice(["qkv", ""]), start=start,
            end=min(points - 1, start + rng.randrange(30))))
    live = [sum(b.bytes for b in found if b.start <= i <= b.end) for i in range(points)]
    peak = max(range(points), key=live.__getitem__)
    found = [dataclasses.replace(b, at_peak=b.start <= peak <= b.end) for b in found]
    breakdown = dict.fromkeys(ROWS, 0) | {"fragmentation": 7 * MIB}
    for buffer in found:
        breakdown[buffer.category] += buffer.bytes * buffer.at_peak
    return Report(
        peak_bytes=live[peak], allocated_bytes=live[peak] + 7 * MIB, breakdown=breakdown, peak_index=peak,
        timeline=tuple(TimelinePoint(i, live[i], PHASES[4 * i // points], f"op.{i}") for i in range(points)),
        buffers=(*found, Buffer("on the host", MIB, memory="host")), program="jit_train_step",
        ledger=(LedgerRow("params", "bf16", 100, 200, 2.0), LedgerRow("total", "", 100, 200, 2.0)),
        findings=(Finding("full_logits", MIB, "the logits are alive", "chunk the loss", "--config.loss.kind=chunked"),),
        residuals_by_name={"qkv": 3 * MIB, "": MIB}, workspace_by_scope={"backward/mlp": MIB},
        xla=XlaStats(temp_bytes=5 * MIB), limit_bytes=2 * live[peak], fits=True, verdict="fits",
        versions={"jax": "9.9.9"}, target={"name": "h200:8", "kind": "NVIDIA H200", "platform": "cuda"},
        config={"model": {"layers": 2}, "mesh": [1, 8]}, notes=("a note",))
