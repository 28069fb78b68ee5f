"""Gradient accumulation inside the step and by optax.MultiSteps against one large batch of the same tokens.

    python tests/bench/accumulation.py
    python tests/bench/accumulation.py --assert                # exit 1 unless a scan saves what it promises
    python tests/bench/accumulation.py --target=h200 --config=gpt2_small       # bytes alone, compiled for a GPU

Rows, each one optimizer update over the same sequences of configs/char.py (or --config): one batch of
--parts x --micro sequences; the same in --parts micro-steps of a scan inside the step; the same in --parts
calls of a step under MultiSteps. Shown: median seconds of an update, ratios by rounds, and the bytes of the
compiled step: arguments (state and batch), temporaries, outputs that alias no argument, and their sum.

--assert holds the scan against one large batch (at most 1.05x the time) and against MultiSteps: at most 0.9x the time,
arguments smaller by at least 0.99 of a tree of float32 parameters, a sum that is no larger.
"""

import argparse
import sys
from typing import Any

import jax
from interleave import Check, Samples, finish, mib, parse_config, parser, take_turns, versions
from ml_collections import ConfigDict
from ours import Trainer, compiled_bytes, start, variant

from bytescope.memory.devices import targets
from bytescope.train.program.program import Program, build

# Time of in-step accumulation by that of one large batch, and by MultiSteps; and the part of a parameter-sized buffer
# that it must save in the arguments.
LIMIT, BY_MULTISTEPS, SAVED = 1.05, 0.9, 0.99
LARGE, SCAN, MULTI = "one large batch", "scan in the step", "MultiSteps"


def cuts(config: ConfigDict, asked: argparse.Namespace) -> dict[str, ConfigDict]:
    """The config with its batch cut in each way."""
    rows = {
        LARGE: (asked.micro * asked.parts, 1, "multisteps"),
        SCAN: (asked.micro, asked.parts, "scan"),
        MULTI: (asked.micro, asked.parts, "multisteps"),
    }
    return {
        name: variant(config, {"batch.micro": micro, "batch.accumulation": parts, "batch.mode": mode})
        for name, (micro, parts, mode) in rows.items()
    }


def checks_of(
    samples: dict[str, Samples], sizes: dict[str, dict[str, int]], parameters: int, check: bool
) -> list[Check]:
    """What a scan in the step owes: time where it was measured, and bytes. `parameters`: bytes of one tree."""
    checks = []
    if samples:
        scan = samples[SCAN]
        checks = [
            Check("time, scan by one large batch", scan.over(samples[LARGE]).median, LIMIT if check else None),
            Check("time, scan by MultiSteps", scan.over(samples[MULTI]).median, BY_MULTISTEPS if check else None),
        ]
    more = sizes[SCAN]["arguments"] - sizes[MULTI]["arguments"]
    peaks = {name: sum(sizes[name].values()) for name in (SCAN, MULTI)}
    return [
        *checks,
        Check("arguments, scan less MultiSteps, in trees of parameters", more / parameters, -SAVED if check else None),
        Check("bytes in all, scan by MultiSteps", peaks[SCAN] / peaks[MULTI], 1.0 if check else None),
    ]


def main() -> int:
    flags = parser(__doc__, rounds=7, steps=2, config="char")
    flags.add_argument("--micro", type=int, default=3, help="sequences of a micro-step (default %(default)s)")
    flags.add_argument("--parts", type=int, default=4, help="micro-steps of an update (default %(default)s)")
    flags.add_argument("--target", default="local", help="another than local is compiled for, not run")
    flags.add_argument("--assert", dest="check", action="store_true", help="exit 1 when a promise is not kept")
    asked, config, _ = parse_config(flags)
    start()
    target, samples = targets.parse(asked.target), {}
    if target.is_described:
        programs: dict[str, Program] = {name: build(cut, target.devices()) for name, cut in cuts(config, asked).items()}
        sizes = {name: compiled_bytes(program.compile()) for name, program in programs.items()}
    else:
        sides = {name: Trainer(cut).warm_up() for name, cut in cuts(config, asked).items()}
        programs = {name: side.program for name, side in sides.items()}
        samples = take_turns({name: side.turn for name, side in sides.items()}, asked.rounds, asked.steps)
        sizes = {name: compiled_bytes(side.compiled) for name, side in sides.items()}
    tokens = programs[LARGE].batch.tokens
    parameters = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(programs[LARGE].state.params))

    def row(name: str) -> dict[str, Any]:
        made = {f"{part} MiB": mib(count) for part, count in sizes[name].items()} | {
            "sum MiB": mib(sum(sizes[name].values()))
        }
        if (taken := samples.get(name)) is None:
            return {"update": name, **made}
        return {
            "update": name,
            "s": f"{taken.median:.3f}",
            "spread": f"{100 * taken.spread:.0f} %",
            "us a token": f"{1e6 * taken.median / tokens:.1f}",
            "to large": str(taken.over(samples[LARGE])),
            "to MultiSteps": str(taken.over(samples[MULTI])),
            **made,
        }

    return finish(
        f"{asked.config} on {target.kind}, {asked.parts} x {asked.micro} sequences, {tokens:,} tokens an "
        f"update, parameters {mib(parameters)} MiB, jax {jax.__version__}",
        [row(name) for name in programs],
        checks_of(samples, sizes, parameters // target.n_devices, asked.check),
        {
            "versions": versions(),
            "tokens": tokens,
            "sides": {
                name: {**(samples[name].to_json() if samples else {}), "bytes": sizes[name]} for name in programs
            },
        },
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
