"""Held-out loss and state bytes of every optimizer, from the same parameters over the same batches of real text.

    python tests/bench/optimizers.py
    python tests/bench/optimizers.py --names adamw adamw_8bit --steps=100 --config.model.n_layers=2
    python tests/bench/optimizers.py --names adamw adamw_8bit --assert     # exit 1 above 0.5 % or 0.27

Each row of the table trains configs/tiny.py (or --config) for --steps updates (300), the schedule stretched to them,
with the config's learning rate times that row's factor, once. Shown: the rate, held-out loss, its ratio to the first
row's, bytes of the state besides parameters for each parameter, as compiled, and seconds.
"""

import sys
import time
from typing import Any

import jax
from interleave import Check, finish, parse_config, parser, versions
from ml_collections import ConfigDict
from ours import start, variant

from bytescope.train.data.batches import heldout_batches, open_data, train_batches
from bytescope.train.data.settings import DataConfig
from bytescope.train.program.program import build
from bytescope.train.run.feed import calls, put
from bytescope.train.step.optimizer.rules import OPTIMIZERS

# Of the config's learning rate, which is AdamW's: no search, the rules of thumb of configs/base.py.
RATES = {"lion": 0.1, "adagrad": 3.0, "momentum": 30.0, "rmsprop": 0.3}
LOSS_LIMIT, BYTES_LIMIT = 1.005, 0.27  # adamw_8bit by adamw


def train(config: ConfigDict, name: str, steps: int) -> dict[str, Any]:
    """Figures of one run."""
    rate = config.optimizer.learning_rate * RATES.get(name, 1.0)
    config = variant(config, {"optimizer.name": name, "optimizer.learning_rate": rate, "train.steps": steps})
    program = build(config)
    reading = DataConfig(**config.data)
    data = open_data(reading)
    compiled = program.compile()
    state, began = program.init(), time.perf_counter()
    batches = train_batches(data, rows=program.batch.global_rows, seed=config.seed, position=0, config=reading)
    for _, host in zip(range(steps), batches):
        for batch in calls(program, host):
            state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    loss = tokens = 0.0
    for host in heldout_batches(data, rows=program.batch.rows, sequences=config.train.eval_sequences or None):
        tally = program.evaluate(state.params, put(host, program.eval_shapes))
        loss, tokens = loss + float(tally.loss), tokens + float(tally.tokens)
    held = [leaf for tree in (program.state.params, program.batch_shapes) for leaf in jax.tree.leaves(tree)]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
    own = sum(leaf.dtype.itemsize * leaf.size for leaf in held)
    return {
        "name": name,
        "rate": rate,
        "loss": loss / tokens,
        "seconds": seconds,
        "bytes": (compiled.memory_analysis().argument_size_in_bytes - own) / parameters,
    }


def main() -> int:
    flags = parser(__doc__, rounds=1, steps=300, config="tiny")
    flags.add_argument("--names", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), help="rows (default: all)")
    flags.add_argument(
        "--assert",
        dest="check",
        action="store_true",
        help=f"exit 1 where adamw_8bit exceeds {LOSS_LIMIT}x adamw's loss or {BYTES_LIMIT}x its bytes",
    )
    asked, config, _ = parse_config(flags)
    if jax.device_count() > 1:
        flags.error("bytes are counted on one device: set JAX_NUM_CPU_DEVICES=1 or CUDA_VISIBLE_DEVICES=0")
    start()
    runs = {name: train(config, name, asked.steps) for name in asked.names}
    first = next(iter(runs.values()))
    rows = [
        {
            "optimizer": name,
            "rate": f"{run['rate']:g}",
            "held-out loss": f"{run['loss']:.4f}",
            f"to {first['name']}": f"{run['loss'] / first['loss']:.4f}",
            "bytes a parameter": f"{run['bytes']:.3f}",
            "s": f"{run['seconds']:.0f}",
        }
        for name, run in runs.items()
    ]
    checks = []
    if {"adamw", "adamw_8bit"} <= set(runs):
        checks = [
            Check(
                f"{title}, adamw_8bit by adamw",
                runs["adamw_8bit"][key] / runs["adamw"][key],
                limit if asked.check else None,
            )
            for title, key, limit in (("held-out loss", "loss", LOSS_LIMIT), ("bytes", "bytes", BYTES_LIMIT))
        ]
    return finish(
        f"{asked.config}, {asked.steps} updates, jax {jax.__version__}",
        rows,
        checks,
        {"versions": versions(), "runs": runs},
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
