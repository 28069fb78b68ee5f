"""Tables of what GPUs measured (tests/gpu/measured) beside what was predicted without one, for tests/bench/RESULTS.md.

    python tests/gpu/tables.py               # bytes and seconds of every row, and a summary
    python tests/gpu/tables.py --json=FILE   # the same as JSON

CHIP.jsonl has rows that `accuracy.py --grid=policies` measured; CHIP_described.jsonl has the same rows compiled for
that chip on a machine without a GPU (`--compile-only --target=CHIP`). Both predictions of bytes are predicted_bytes:
without the GPU, and with the program that was compiled on the GPU, where XLA tries kernels. Seconds are those of an
update, predicted without the GPU from published rates.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy import step_seconds

FOLDER = Path(__file__).with_name("measured")
GIB = 2**30
# Programs with less are dominated by what the compiler's own trials held.
SMALL_BYTES = GIB
# Step times nearer than this are not ordered: equal runs differ by as much.
TIE = 0.02
# The runtime overhead whose formula was derived from these measurements.
WORKSPACE, POLICY = "cuDNN attention workspace", "remat.policy"


@dataclasses.dataclass(frozen=True)
class Line:
    """A measured row. Bytes are of one GPU, seconds of an update.

    Fields:
        name: the name of the row. config: the config, and whether its layers are unrolled. keys: its changed keys.
        described, compiled, measured: bytes predicted without the GPU, predicted with it, and the allocator's peak.
        workspace: bytes of `described` that the formula for the workspace of cuDNN's attention adds.
        predicted_seconds, seconds: predicted without the GPU, and the measured median.
        interval: the seconds between which four of five runs are expected.
    """

    name: str
    config: str
    keys: Mapping[str, str]
    described: int
    workspace: int
    compiled: int
    measured: int
    predicted_seconds: float
    seconds: float
    interval: tuple[float, float]

    @property
    def error(self) -> float:
        """(predicted without the GPU - measured) / measured bytes."""
        return self.described / self.measured - 1

    @property
    def compiled_error(self) -> float:
        """(predicted with the GPU - measured) / measured bytes."""
        return self.compiled / self.measured - 1

    @property
    def ratio(self) -> float:
        """Predicted by measured seconds."""
        return self.predicted_seconds / self.seconds


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """The last finished answer of each row of a file of accuracy.py, by name."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["name"]: line | line["answer"] for line in found if "failed" not in line["answer"]}


def lines_of(chip: str, folder: Path = FOLDER) -> list[Line]:
    """The rows of a chip that were measured and predicted, in the order of the file."""
    described = answers(folder / f"{chip}_described.jsonl")
    lines = []
    for name, seen in answers(folder / f"{chip}.jsonl").items():
        taken, said = step_seconds(seen), described.get(name)
        if not taken or not said or not said.get("prediction"):
            continue
        keys, prediction = seen["asked"]["keys"], said["prediction"]
        lines.append(
            Line(
                name,
                f"{seen['asked']['config']} {keys.get('model.unroll', '')}",
                keys,
                said["predicted"],
                sum(item["bytes"] for item in said["runtime_overheads"] if item["name"] == WORKSPACE),
                seen["predicted"],
                seen["measured"],
                # A report's prediction is of one call; MultiSteps calls the program once a micro-batch.
                prediction["seconds"] * said["calls"],
                taken,
                (prediction["seconds_low"] * said["calls"], prediction["seconds_high"] * said["calls"]),
            )
        )
    return lines


def ordered(lines: Sequence[Line], *, only_policy: bool = False) -> tuple[int, int]:
    """(pairs in the right order, all pairs): rows of one config whose measured seconds differ by more than TIE.

    only_policy: count only pairs that differ in no other key than the remat policy.
    """
    right = pairs = 0
    for one, other in itertools.combinations(lines, 2):
        if only_policy and {key for key, _ in one.keys.items() ^ other.keys.items()} != {POLICY}:
            continue
        if one.config == other.config and abs(one.seconds / other.seconds - 1) > TIE:
            pairs += 1
            right += (one.seconds < other.seconds) == (one.predicted_seconds < other.predicted_seconds)
    return right, pairs


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """The figures under the table; programs of SMALL_BYTES and more."""
    large = [line for line in lines if line.measured >= SMALL_BYTES]
    return {
        "rows": len(large),
        "bytes within 1 %": sum(abs(line.error) <= 0.01 for line in large),
        "bytes within 1 % without the formula for cuDNN's workspace": sum(
            abs((line.described - line.workspace) / line.measured - 1) <= 0.01 for line in large
        ),
        "bytes within 2 %": sum(abs(line.error) <= 0.02 for line in large),
        "compiled on the GPU, bytes within 1 %": sum(abs(line.compiled_error) <= 0.01 for line in large),
        "seconds within 10 %": sum(abs(line.ratio - 1) <= 0.1 for line in large),
        "seconds within the predicted interval (80 %)": sum(
            line.interval[0] <= line.seconds <= line.interval[1] for line in large
        ),
        "median predicted/measured seconds": round(statistics.median(line.ratio for line in large), 3),
        "pairs of one config in the right order": "{} of {}".format(*ordered(large)),
        "of these, pairs that differ only in the remat policy": "{} of {}".format(*ordered(large, only_policy=True)),
    }


def markdown(lines: Sequence[Line]) -> str:
    """The table: GiB, per cent, milliseconds."""
    head = "| row | predicted without a GPU | error | compiled on the GPU | error | measured | ms | predicted | ratio |"
    body = [
        f"| {line.name} | {line.described / GIB:.3f} | {100 * line.error:+.2f} % | {line.compiled / GIB:.3f} "
        f"| {100 * line.compiled_error:+.2f} % | {line.measured / GIB:.3f} | {1e3 * line.seconds:.2f} "
        f"| {1e3 * line.predicted_seconds:.2f} | {line.ratio:.3f} |"
        for line in lines
    ]
    return "\n".join([head, "|---|" + "---:|" * 8, *body])


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--chip", default="h100", help="a file of tests/gpu/measured (default %(default)s)")
    flags.add_argument("--json", type=Path, metavar="FILE", help="write rows and summary as JSON")
    asked = flags.parse_args()
    lines = lines_of(asked.chip)
    stamps = {json.dumps(each["stamp"]) for each in answers(FOLDER / f"{asked.chip}.jsonl").values()}
    print(markdown(lines), "", *(f"- {name}: {value}" for name, value in summary(lines).items()), sep="\n")
    print(*sorted(stamps), sep="\n")
    if asked.json:
        rows = [dataclasses.asdict(line) for line in lines]
        asked.json.write_text(json.dumps({"summary": summary(lines), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
