"""Measured and predicted milliseconds per update of traced programs, as Markdown tables.

    python tests/bench/trace_kinds.py --traces=DIR --reports=DIR [NAME ...]

DIR/NAME of --traces is a folder with a trace, DIR/NAME.json of --reports is the report of the same program. The first
table has a row per program and a column per kind of work; the second one has the products and attention kernels with
their sizes, summed over the programs, the largest difference first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bytescope.memory.profile import breakdown, instruction_seconds, xplane
from bytescope.memory.profile.op_scopes import OpScopes
from bytescope.memory.records import report_record

KINDS = ("products", "attention", "memory", "copies", "host link")
MAX_SIZES = 16


def main() -> None:
    """Prints the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs to compare (default: all in the folder of traces)")
    parser.add_argument("--traces", type=Path, required=True, help="folder with a folder per trace")
    parser.add_argument("--reports", type=Path, required=True, help="folder with a report per trace")
    args = parser.parse_args()
    print(f"| program | update | {' | '.join(KINDS)} | other |\n|{'---|' * (len(KINDS) + 3)}")
    sizes: dict[tuple[str, tuple[int, ...], str, str], list[float]] = {}
    for name in args.names or sorted(path.name for path in args.traces.iterdir()):
        trace = xplane.read(xplane.find(args.traces / name))
        report = report_record.load(args.reports / f"{name}.json")
        scopes = OpScopes(trace)
        found = breakdown.find(trace, max(report.subject.calls, 1), scopes)
        attribution = scopes.main_attribution()
        compared = instruction_seconds.compare(found, attribution, report)
        if attribution is None or compared is None:
            raise SystemExit(f"{name}: the trace and the report are not of the same program")
        # by_phase contains the predicted waiting; the sum of its rows is the predicted update
        whole = found.measured, sum(predicted for _, predicted in compared.by_phase.values())
        pairs = [whole, *(compared.by_kind.get(kind, (0.0, 0.0)) for kind in KINDS)]
        unknown = sum(taken for names, taken in found.cells.items() if "other" in names) / found.busy
        print(f"| {name} | {' | '.join(map(_pair, pairs))} | {unknown:.2%} |")
        instructions = {one.name: one for one in attribution.module.instructions.values()}
        for row in compared.instructions:
            if row.kind in ("products", "attention") and row.measured and row.name in instructions:
                one = instructions[row.name]
                dtype = attribution.module.shape(one).dtype or attribution.module.shape(one).parts[0].dtype
                kernel = one.target.strip("_") or "XLA's own"
                sums = sizes.setdefault((row.kind, row.size, dtype, kernel), [0.0, 0.0, 0.0, 0.0])
                for i, value in enumerate((row.measured, row.predicted, row.flops, row.bytes)):
                    sums[i] += value
    print("\n| kind | size | result | kernel | measured | predicted | ratio | TFLOP/s | TB/s |\n|" + "---|" * 9)
    for (kind, size, dtype, kernel), sums in sorted(sizes.items(), key=lambda item: -abs(item[1][0] - item[1][1]))[
        :MAX_SIZES
    ]:
        measured, predicted, flops, moved = sums
        print(
            f"| {kind} | {' x '.join(map(str, size))} | {dtype} | {kernel} | {1e3 * measured:.1f} | "
            f"{1e3 * predicted:.1f} | {measured / predicted:.2f} | {flops / measured / 1e12:.0f} | "
            f"{moved / measured / 1e12:.2f} |"
        )


def _pair(pair: tuple[float, float]) -> str:
    measured, predicted = pair
    if not predicted:
        return "" if measured < 1e-4 else f"{1e3 * measured:.2f}"
    return f"{1e3 * measured:.2f} / {1e3 * predicted:.2f} = {measured / predicted:.2f}"


if __name__ == "__main__":
    main()
