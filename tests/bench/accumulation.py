"""Gradient accumulation inside the step and by optax.MultiSteps against one large batch of the same tokens.

    python tests/bench/accumulation.py
    python tests/bench/accumulation.py --assert --micro=12     # exit 1 above 1.05x of the large batch

Rows, each one optimizer update over the same sequences of configs/char.py (or --config): one batch of
--parts x --micro sequences; the same in --parts micro-steps of a scan inside the step; the same in --parts
calls of a step under MultiSteps. Shown: median seconds of an update, ratios by rounds, and the bytes of the
compiled step: arguments (state and batch), temporaries, outputs that alias no argument, and their sum.
"""

import sys
from typing import Any

import jax
from interleave import Check, finish, mib, parse_config, parser, take_turns, versions
from ml_collections import ConfigDict
from ours import Trainer, compiled_bytes, start, variant

LIMIT = 1.05  # time of in-step accumulation by that of one large batch


def cut(config: ConfigDict, micro: int, parts: int, mode: str) -> Trainer:
    """The program of `config` with its batch cut that way, warmed up."""
    keys = {"batch.micro": micro, "batch.accumulation": parts, "batch.mode": mode}
    return Trainer(variant(config, keys)).warm_up()


def main() -> int:
    flags = parser(__doc__, rounds=7, steps=2, config="char")
    flags.add_argument("--micro", type=int, default=3, help="sequences of a micro-step (default %(default)s)")
    flags.add_argument("--parts", type=int, default=4, help="micro-steps of an update (default %(default)s)")
    flags.add_argument("--assert", dest="check", action="store_true", help=f"exit 1 above {LIMIT}x")
    asked, config, _ = parse_config(flags)
    start()
    large, scan, multi = "one large batch", "scan in the step", "MultiSteps"
    sides = {large: cut(config, asked.micro * asked.parts, 1, "multisteps"),
             scan: cut(config, asked.micro, asked.parts, "scan"),
             multi: cut(config, asked.micro, asked.parts, "multisteps")}
    samples = take_turns({name: side.turn for name, side in sides.items()}, asked.rounds, asked.steps)
    tokens = sides[large].program.batch.tokens
    sizes = {name: compiled_bytes(side.compiled) for name, side in sides.items()}

    def row(name: str) -> dict[str, Any]:
        return {"update": name, "s": f"{samples[name].median:.3f}",
                "spread": f"{100 * samples[name].spread:.0f} %",
                "us a token": f"{1e6 * samples[name].median / tokens:.1f}",
                "to large": str(samples[name].over(samples[large])),
                "to MultiSteps": str(samples[name].over(samples[multi])),
                **{f"{part} MiB": mib(count) for part, count in sizes[name].items()},
                "sum MiB": mib(sum(sizes[name].values()))}

    checks = [Check("time, scan by one large batch", samples[scan].over(samples[large]).median,
                    LIMIT if asked.check else None),
              Check("time, scan by MultiSteps", samples[scan].over(samples[multi]).median, None)]
    return finish(f"{asked.config}, {asked.parts} x {asked.micro} sequences, {tokens:,} tokens an update, "
                  f"jax {jax.__version__}", [row(name) for name in sides], checks,
                  {"versions": versions(), "tokens": tokens, "sides": {
                      name: {**samples[name].to_json(), "bytes": sizes[name]} for name in sides}}, asked.json)


if __name__ == "__main__":
    sys.exit(main())
