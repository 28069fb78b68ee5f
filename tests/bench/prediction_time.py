"""What predicting the seconds of a step adds to a report: reports of one program with and without it, in turn.

    python tests/bench/prediction_time.py                                    # llama_8b on h100:8
    python tests/bench/prediction_time.py --config=gpt2_small --target=h200  # layers unrolled: many more kernels
    python tests/bench/prediction_time.py --assert                           # at most 10 % more

A report is made of the compiler's answer, as `bytescope report` makes it; compiling is shown beside it and not part of
the ratio. With it: the schedule is read, walked at the target's rates, and stands in the JSON. What is timed are the
seconds that this process computes, which other work on the machine hardly lengthens.
"""

import gc
import sys
import time
from unittest import mock

from interleave import Check, finish, parse_config, parser, take_turns, versions

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.devices.platform import simulate_devices
from bytescope.memory.seconds import reading

MOST = 1.10  # a report with its prediction by one without


def main() -> int:
    """Prints the table; 1 where --assert was given and the ratio is above `MOST`."""
    flags = parser(__doc__, rounds=9, steps=5, config="llama_8b")
    flags.add_argument("--target", default="h100:8", help="a described target (default %(default)s)")
    flags.add_argument("--assert", dest="check", action="store_true", help=f"fail above {MOST:g}")
    asked, config, _ = parse_config(flags)
    simulate_devices([asked.target])
    from bytescope.train.program.program import build

    target = targets.parse(asked.target)
    program = build(config, target.devices())
    began = time.process_time()
    compilation = program.compile_for_report(exact=True)
    compiling = time.process_time() - began

    def predicted() -> None:
        found = report_of(compilation, target=target, seconds=True)
        if not found.prediction:
            sys.exit(f"nothing is predicted for {asked.target}: its rates are not known, or nothing takes time")

    def without() -> None:
        with mock.patch.object(reading, "read", lambda *args, **kwargs: ()):
            report_of(compilation, target=target)

    def turn(side):
        def seconds(steps: int) -> list[float]:
            out = []
            for _ in range(steps):
                gc.collect()  # what is collected amid a turn was made in many of them
                gc.disable()
                began = time.process_time()
                side()
                out.append(time.process_time() - began)
                gc.enable()
            return out

        return seconds

    predicted(), without()  # what is imported, and tables that are made once
    samples = take_turns({"with": turn(predicted), "without": turn(without)}, asked.rounds, asked.steps)
    ratio = samples["with"].over(samples["without"])
    rows = [
        {"report": "without a prediction", "CPU s": f"{samples['without'].median:.3f}", "ratio": ""},
        {"report": "with it", "CPU s": f"{samples['with'].median:.3f}", "ratio": str(ratio)},
        {"report": "compiling", "CPU s": f"{compiling:.1f}", "ratio": ""},
    ]
    checks = [Check("a report with its prediction by one without", ratio.median, MOST if asked.check else None)]
    figures = {"versions": versions(), "samples": {name: each.to_json() for name, each in samples.items()}}
    return finish(f"{asked.config} on {asked.target}", rows, checks, figures, asked.json)


if __name__ == "__main__":
    sys.exit(main())
