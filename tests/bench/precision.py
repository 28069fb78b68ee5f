"""Held-out loss and bytes of every precision preset, from the same parameters over the same batches of real text.

    python tests/bench/precision.py
    python tests/bench/precision.py --names fp32 bf16 --seeds=3 --config.model.n_layers=2
    python tests/bench/precision.py --assert     # exit 1 where a row leaves its limit

Each row of the table trains configs/tiny.py (or --config) for --steps updates (300), the schedule stretched to them,
from each of --seeds seeds: of so short a run one seed's held-out loss says little, runs in one precision differ by a
per cent. `bf16_params nearest` is without stochastic rounding; `fp16 overflow` starts from a loss scale that no
gradient survives, which may grow after 100 good updates. Rows that end in `slow` learn at 3e-4, one each for fp32 and
both roundings: at the configs' own rates updates are wider than bfloat16's steps, and no rounding loses them. Shown:
mean held-out loss and half its range, its ratio to the first row's (the first slow row's), updates skipped and the last
loss scale, bytes of the state with parameters for each parameter, as compiled, and seconds.

--assert holds losses to their limits; of `fp16 overflow` in every seed that the scale falls, not all updates are
skipped, the scale grows again and the training loss falls; of the slow rows that stochastic rounding visibly beats
nearest. It needs the 300 updates.
"""

import math
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax
from interleave import Check, finish, parse_config, parser, versions
from ml_collections import ConfigDict
from ours import start, variant

from bytescope.train.data.batches import heldout_batches, open_data, train_batches
from bytescope.train.data.settings import DataConfig
from bytescope.train.program.program import build
from bytescope.train.run.feed import calls, put

SLOW = {"optimizer.learning_rate": 3e-4}
ROWS = {
    "fp32": {},
    "bf16": {},
    "bf16_params": {},
    "bf16_params nearest": {"precision.rounding": "nearest"},
    "fp16 overflow": {"precision.loss_scale_init": 2.0**40, "precision.loss_scale_growth_every": 100},
    "fp16": {},
    "fp8": {},
    "bf16_grads": {},
    "fp32_grads": {},
    "fp32 slow": SLOW,
    "bf16_params slow": SLOW,
    "bf16_params nearest slow": {"precision.rounding": "nearest", **SLOW},
}
# (row, row it is held to) -> greatest ratio of their losses, either way.
LIMITS = {
    ("bf16", "fp32"): 1.005,
    ("bf16_params", "fp32"): 1.01,
    ("fp16", "fp32"): 1.005,
    ("fp16 overflow", "fp32"): 1.02,
    ("fp8", "bf16"): 1.01,
    ("bf16_params slow", "fp32 slow"): 1.01,
}
ROUNDINGS = ("bf16_params slow", "bf16_params nearest slow")
VISIBLE = 0.99  # greatest ratio of the losses of these two
# What recovery from an overflow is -> (figure of one run, its greatest value).
RECOVERY = {
    "least loss scale by the first": (lambda run: min(run["scales"]) / run["scale_init"], 0.5),
    "updates skipped by all": (lambda run: run["skipped"] / len(run["scales"]), 0.2),
    "least loss scale by the greatest after it": (lambda run: _regrown(run["scales"]), 0.5),
    "training loss, last tenth by first update": (lambda run: _fallen(run["trained"]), 0.9),
}


def _regrown(scales: list[float]) -> float:
    least = min(scales)
    return least / max(scales[scales.index(least) :])


def _worst(figures: Iterable[float]) -> float:
    return max(figures, key=lambda figure: math.inf if math.isnan(figure) else figure)


def _fallen(losses: list[float]) -> float:
    last = losses[-max(len(losses) // 10, 1) :]
    return sum(last) / len(last) / losses[0]


def train(config: ConfigDict, name: str, steps: int, seed: int) -> dict[str, Any]:
    """Figures of one run."""
    config = variant(config, {"precision.preset": name.split()[0], "train.steps": steps, "seed": seed, **ROWS[name]})
    program = build(config)
    reading = DataConfig(**config.data)
    data = open_data(reading)
    compiled = program.compile()
    state, began, scales, trained = program.init(), time.perf_counter(), [], []
    batches = train_batches(data, rows=program.batch.global_rows, seed=config.seed, position=0, config=reading)
    for _, host in zip(range(steps), batches):
        for batch in calls(program, host):
            state, metrics = compiled(state, batch)
        trained.append(metrics["loss"])
        if "loss_scale" in metrics:
            scales.append(float(metrics["loss_scale"]))
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    loss = tokens = 0.0
    for host in heldout_batches(data, rows=program.batch.rows, sequences=config.train.eval_sequences or None):
        tally = program.evaluate(state.params, put(host, program.eval_shapes))
        loss, tokens = loss + float(tally.loss), tokens + float(tally.tokens)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
    batch = sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(program.batch_shapes))
    skipped = int(state.loss_scale.skipped) if state.loss_scale else None
    return {
        "name": name,
        "loss": loss / tokens,
        "seconds": seconds,
        "skipped": skipped,
        "scales": scales,
        "scale_init": config.precision.loss_scale_init,
        "trained": [float(loss) for loss in trained],
        "bytes": (compiled.memory_analysis().argument_size_in_bytes - batch) / parameters,
    }


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of one row as one: means, half the range of the loss."""
    losses = [run["loss"] for run in runs]
    return {
        **runs[-1],
        "loss": sum(losses) / len(losses),
        "spread": (max(losses) - min(losses)) / 2,
        "losses": losses,
        "each": runs,
        "seconds": sum(run["seconds"] for run in runs) / len(runs),
    }


def row(run: dict[str, Any], runs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """One line of the table."""
    first = next(other for other in runs.values() if _slow(other) == _slow(run))
    return {
        "precision": run["name"],
        "held-out loss": f"{run['loss']:.4f}",
        "+-": f"{run['spread']:.4f}",
        "to first": f"{run['loss'] / first['loss']:.4f}",
        "skipped": "-" if run["skipped"] is None else str(run["skipped"]),
        "loss scale": f"{run['scales'][-1]:g}" if run["scales"] else "-",
        "bytes a parameter": f"{run['bytes']:.2f}",
        "s": f"{run['seconds']:.0f}",
    }


def _slow(run: dict[str, Any]) -> bool:
    return run["name"].endswith("slow")


def checks_of(runs: dict[str, dict[str, Any]], asked: bool) -> list[Check]:
    """Figures with their limits, of the rows that ran; of several seeds the worst."""
    found = []
    for (name, other), limit in LIMITS.items():
        if {name, other} <= runs.keys():
            ratio = runs[name]["loss"] / runs[other]["loss"]
            found.append(
                Check(
                    f"held-out loss, {name} and {other}, the greater by the less",
                    max(ratio, 1 / ratio),
                    limit if asked else None,
                )
            )
    if runs.keys() >= set(ROUNDINGS):
        ratio = runs[ROUNDINGS[0]]["loss"] / runs[ROUNDINGS[1]]["loss"]
        found.append(Check("held-out loss, slow, stochastic rounding by nearest", ratio, VISIBLE if asked else None))
    if "fp16 overflow" in runs:
        found += [
            Check(
                f"fp16 overflow, {name}", _worst(map(figure, runs["fp16 overflow"]["each"])), limit if asked else None
            )
            for name, (figure, limit) in RECOVERY.items()
        ]
    return found


def main() -> int:
    flags = parser(__doc__, rounds=1, steps=300, config="tiny")
    flags.add_argument("--names", nargs="+", choices=ROWS, default=list(ROWS), help="rows (default: all)")
    flags.add_argument("--assert", dest="check", action="store_true", help="exit 1 where a row leaves its limit")
    flags.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    asked, config, _ = parse_config(flags)
    if jax.device_count() > 1:
        flags.error("bytes are counted on one device: set JAX_NUM_CPU_DEVICES=1 or CUDA_VISIBLE_DEVICES=0")
    start()
    runs: dict[str, dict[str, Any]] = {}
    for name in asked.names:
        runs[name] = over_seeds([train(config, name, asked.steps, seed) for seed in range(asked.seeds)])
        print(*row(runs[name], runs).values(), sep="  ", file=sys.stderr, flush=True)
    rows = [row(run, runs) for run in runs.values()]
    return finish(
        f"{asked.config}, {asked.steps} updates, jax {jax.__version__}",
        rows,
        checks_of(runs, asked.check),
        {"versions": versions(), "runs": runs},
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
