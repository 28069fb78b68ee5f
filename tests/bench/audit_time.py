"""What the audit adds to a report: reports of one program with and without it, in turn.

    python tests/bench/audit_time.py                                    # llama_8b on h100:8
    python tests/bench/audit_time.py --config=gpt2_small --target=h200  # layers unrolled: many more equations
    python tests/bench/audit_time.py --assert                           # at most 5 % of the whole report

The rows read the compiler's answer, as `bytescope report` does, with the predicted seconds, again and again in one
process. The whole report also traces and compiles the program, which is measured once. The seconds are CPU seconds of
this process, which other work on the machine hardly lengthens.
"""

import gc
import sys
import time
from unittest import mock

from interleave import Check, finish, parse_config, parser, take_turns, versions

from bytescope.memory.analysis import report_of
from bytescope.memory.audit import audit_program
from bytescope.memory.devices import targets
from bytescope.memory.devices.platform import simulate_devices

MAX_SHARE = 0.05  # the audit's part of the CPU seconds of a whole report


def main() -> int:
    """Prints the table; returns 1 if --assert was given and the share is above `MAX_SHARE`."""
    flags = parser(__doc__, rounds=9, steps=5, config="llama_8b")
    flags.add_argument("--target", default="h100:8", help="a described target (default %(default)s)")
    flags.add_argument("--assert", dest="check", action="store_true", help=f"fail above {MAX_SHARE:g}")
    asked, config, _ = parse_config(flags)
    simulate_devices([asked.target])
    from bytescope.train.program.program import build

    target = targets.parse(asked.target)
    began = time.process_time()
    program = build(config, target.devices())
    compilation = program.compile_for_report(exact=True)
    compiling = time.process_time() - began

    def with_audit() -> None:
        report_of(compilation, target=target, seconds=True)

    def without() -> None:
        with mock.patch.object(audit_program, "AUDITS", ()):
            report_of(compilation, target=target, seconds=True)

    def turn(side):
        def seconds(steps: int) -> list[float]:
            out = []
            for _ in range(steps):
                gc.collect()  # garbage of other turns is not collected amid a turn
                gc.disable()
                began = time.process_time()
                side()
                out.append(time.process_time() - began)
                gc.enable()
            return out

        return seconds

    with_audit(), without()  # imports, and tables that are made once
    samples = take_turns({"with": turn(with_audit), "without": turn(without)}, asked.rounds, asked.steps)
    ratio = samples["with"].over(samples["without"])
    rows = [
        {"report": "without the audit", "CPU s": f"{samples['without'].median:.3f}", "ratio": ""},
        {"report": "with it", "CPU s": f"{samples['with'].median:.3f}", "ratio": str(ratio)},
    ]
    audit = samples["with"].median - samples["without"].median
    share = audit / (compiling + samples["with"].median)
    rows.append({"report": "tracing and compiling", "CPU s": f"{compiling:.3f}", "ratio": ""})
    checks = [Check("the audit's part of a whole report", share, MAX_SHARE if asked.check else None)]
    figures = {"versions": versions(), "samples": {name: each.to_json() for name, each in samples.items()}}
    return finish(f"{asked.config} on {asked.target}", rows, checks, figures, asked.json)


if __name__ == "__main__":
    sys.exit(main())
