"""Seconds to compile 12 and 48 layers: scanned, where depth should be free, and unrolled.

    python tests/bench/scan.py
    python tests/bench/scan.py --assert --no-unrolled     # exit 1 when 48 scanned layers take over 1.3x of 12

The training step of configs/tiny.py (or --config) at those depths, lowered and compiled cold: no persistent
cache, and jax's own caches of traced functions cleared before each. Shown: median seconds of both parts, of
their sum, the ratio to the shallow scanned one, and the temporaries of the compiled step.
"""

import sys
import time
from typing import Any

import jax
from interleave import Check, Turn, finish, mib, parse_config, parser, take_turns, versions
from ml_collections import ConfigDict
from ours import compiled_bytes, start, variant

from bytescope.train.parallel.xla_options import xla_remat_pass
from bytescope.train.program.program import build

LIMIT = 1.3


class Compile:
    """Compiles one depth once a step, and remembers the parts."""

    def __init__(self, config: ConfigDict):
        self.config = config
        self.lower_seconds: list[float] = []
        self.bytes: dict[str, int] = {}

    def once(self) -> float:
        program = build(self.config)
        jax.clear_caches()
        began = time.perf_counter()
        lowered = program.lower()
        self.lower_seconds.append(time.perf_counter() - began)
        with xla_remat_pass(self.config.remat.xla_pass):
            compiled = lowered.compile()
        seconds = time.perf_counter() - began
        self.bytes = compiled_bytes(compiled)
        return seconds

    @property
    def turn(self) -> Turn:
        return lambda steps: [self.once() for _ in range(steps)]


def main() -> int:
    flags = parser(__doc__, rounds=3, steps=1, config="tiny")
    flags.add_argument("--layers", type=int, nargs=2, default=(12, 48), help="two depths (default 12 48)")
    flags.add_argument("--no-unrolled", action="store_true", help="the scanned ones alone")
    flags.add_argument("--assert", dest="check", action="store_true", help=f"exit 1 above {LIMIT}x scanned")
    asked, config, _ = parse_config(flags)
    start()
    shallow, deep = (f"{layers} scanned" for layers in asked.layers)
    sides = {
        f"{layers} {'scanned' if scan else 'unrolled'}": Compile(
            variant(config, {"model.n_layers": layers, "model.scan": scan, "model.unroll": 1})
        )
        for scan in ((True,) if asked.no_unrolled else (True, False))
        for layers in asked.layers
    }
    sides[shallow].once()  # the first compile of a process also starts the compiler
    sides[shallow].lower_seconds.clear()
    samples = take_turns({name: side.turn for name, side in sides.items()}, asked.rounds, asked.steps)

    def row(name: str) -> dict[str, Any]:
        lower = sorted(sides[name].lower_seconds)[len(sides[name].lower_seconds) // 2]
        return {
            "layers": name,
            "trace and lower s": f"{lower:.2f}",
            "XLA s": f"{samples[name].median - lower:.2f}",
            "sum s": f"{samples[name].median:.2f}",
            "spread": f"{100 * samples[name].spread:.0f} %",
            f"to {shallow}": str(samples[name].over(samples[shallow])),
            "temp MiB": mib(sides[name].bytes["temp"]),
        }

    check = Check(
        f"compile, {deep} by {shallow}", samples[deep].over(samples[shallow]).median, LIMIT if asked.check else None
    )
    return finish(
        f"cold compile of the step of {asked.config}, jax {jax.__version__}",
        [row(name) for name in sides],
        [check],
        {
            "versions": versions(),
            "sides": {
                name: {**samples[name].to_json(), "lower_s": side.lower_seconds, "bytes": side.bytes}
                for name, side in sides.items()
            },
        },
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
