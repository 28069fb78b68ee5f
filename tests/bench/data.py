"""How fast the data loader delivers, beside how fast the model eats.

    python tests/bench/data.py                 # the default corpus, configs/tiny.py
    python tests/bench/data.py --assert        # exit 1 below 20x of what the step consumes
    python tests/bench/data.py --config=gpt2_small --config.data.source=SHARDS

In turn: batches of configs/tiny.py (or --config) read as training reads them and put on the device, nothing else done;
and training steps on batches that are there already. Tokens a second of both; what the loader delivers must be many
times what the step takes, since on a real run both share the host's cores.
"""

import itertools
import sys
import time

from interleave import Check, finish, parse_config, parser, take_turns, versions
from ours import Trainer, start

from bytescope.train.data.batches import DataConfig, open_data, train_batches
from bytescope.train.run.feed import feed, local_rows

LEAST = 20.0
AHEAD = 64  # updates read in one sample: what was read ahead before it is lost in them


def main() -> int:
    flags = parser(__doc__, rounds=5, steps=2, config="tiny")
    flags.add_argument("--assert", dest="check", action="store_true", help=f"exit 1 below {LEAST:g}x")
    asked, config, _ = parse_config(flags)
    start()
    trainer = Trainer(config).warm_up()
    program = trainer.program
    data = open_data(DataConfig(**config.data))
    batches = feed(
        program,
        train_batches(
            data,
            rows=program.batch.global_rows,
            row_slices=local_rows(program),
            seed=config.seed,
            position=0,
            config=DataConfig(**config.data),
        ),
    )
    next(batches)

    def read(steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            for batch in itertools.islice(batches, AHEAD):
                for call in batch:
                    for array in call.values():
                        array.block_until_ready()
            seconds.append((time.perf_counter() - began) / AHEAD)
        return seconds

    samples = take_turns({"read": read, "step": trainer.turn}, asked.rounds, asked.steps)
    tokens = program.batch.tokens
    times = samples["step"].over(samples["read"])
    rows = [
        {
            "side": name,
            "s an update": f"{taken.median:.5f}",
            "spread": f"{100 * taken.spread:.0f} %",
            "tokens/s": f"{tokens / taken.median:,.0f}",
        }
        for name, taken in samples.items()
    ]
    # A bar from below: as a quotient that must be at most its inverse.
    checks = [
        Check(
            f"what the step takes by what is read ({times} times as much is read)",
            1 / times.median,
            1 / LEAST if asked.check else None,
        )
    ]
    return finish(
        f"{asked.config}: {data.description}",
        rows,
        checks,
        {"versions": versions(), "tokens": tokens, "sides": {name: taken.to_json() for name, taken in samples.items()}},
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
