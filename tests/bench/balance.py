"""How the load of experts moves toward balance, by router: choices of the busiest expert over the mean.

    python tests/bench/balance.py
    python tests/bench/balance.py --steps=50 --config.model.n_layers=2
    python tests/bench/balance.py --assert      # exit 1 where what is above 1 does not fall to 0.8 of it

Each row trains configs/tiny_moe.py (or --config) for --steps updates (200) from the same parameters over the same
batches of real text; shown is the mean over layers, averaged over the ten updates that end at each column.
"""

import sys
from typing import Any

import jax
from interleave import Check, finish, parse_config, parser, versions
from ml_collections import ConfigDict
from ours import start, variant

from bytescope.train.data.batches import open_data, train_batches
from bytescope.train.data.settings import DataConfig
from bytescope.train.program.program import build
from bytescope.train.run.feed import calls

ROUTERS = {
    "softmax": {},
    "softmax, not renormalized": {"model.router_renormalize": False},
    "softmax, no auxiliary loss": {"loss.balance": 0.0},
    "sigmoid with bias": {
        "model.router": "sigmoid",
        "model.router_bias": True,
        "loss.balance": 0.0,
        "optimizer.router_bias_rate": 0.01,
    },
}
BALANCED = [name for name in ROUTERS if "no auxiliary" not in name]
LIMIT = 0.8  # of what is above 1, the last by the first
WINDOW = 10  # updates that are averaged


def loads(config: ConfigDict, keys: dict[str, Any], steps: int) -> list[float]:
    """Mean over layers of the busiest expert's choices over the mean, of each update."""
    config = variant(config, {**keys, "train.steps": steps})
    program, reading = build(config), DataConfig(**config.data)
    compiled, state, found = program.compile(), program.init(), []
    batches = train_batches(
        open_data(reading), rows=program.batch.global_rows, seed=config.seed, position=0, config=reading
    )
    for _, host in zip(range(steps), batches):
        for batch in calls(program, host):
            state, metrics = compiled(state, batch)
        found.append(float(metrics["load_mean"]))
    return found


def main() -> int:
    flags = parser(__doc__, rounds=1, steps=200, config="tiny_moe")
    flags.add_argument("--assert", dest="check", action="store_true", help=f"exit 1 above {LIMIT}")
    asked, config, _ = parse_config(flags)
    start()
    every = max(asked.steps // 8, 1)
    columns = [1, *range(every, asked.steps + 1, every)]
    runs = {name: loads(config, keys, asked.steps) for name, keys in ROUTERS.items()}
    rows, checks = [], []
    for name, found in runs.items():
        means = {at: sum(part) / len(part) for at in columns if (part := found[max(at - WINDOW, 0) : at])}
        rows.append({"router": name, **{str(at): f"{mean:.2f}" for at, mean in means.items()}})
        if name in BALANCED:
            first, last = means[columns[0]], means[columns[-1]]
            checks.append(
                Check(f"{name}: load above 1, last by first", (last - 1) / (first - 1), LIMIT if asked.check else None)
            )
    return finish(
        f"{asked.config}, {asked.steps} updates, jax {jax.__version__}",
        rows,
        checks,
        {"versions": versions(), "loads": runs},
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
