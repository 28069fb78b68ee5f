"""Predicted against measured peak over configs x policies x precisions x accumulation, on the card at hand.

    python tests/gpu/accuracy.py    # 42 rows, about 25 minutes on one H200; Ctrl-C, and again: it resumes
    python tests/gpu/accuracy.py --calibrate            # what is there already, and the lines that calibrate the tables
    python tests/gpu/accuracy.py --grid=short           # 8 rows
    python tests/gpu/accuracy.py --grid=policies --jobs=8     # 42 rows of twelve timed updates, compiled 8 at a time
    python tests/gpu/accuracy.py --configs=llama_1b --policies=full,dots --precisions=bf16 --accumulations=1,4,4:scan
    python tests/gpu/accuracy.py --compile-only --target=h200        # the same table without a card, nothing measured

Each row compiles, predicts and runs two updates on random tokens in a process of its own (rows of --grid=policies
twelve, which are timed). Columns, in GiB: what the compiler counts; that with the items of
memory/peak/runtime_overheads.py in the allocator's pool; the allocator's peak; the error of the prediction in per cent
of the measured; what the card holds outside the pool, by NVML, in MiB (of a row that ran alone); milliseconds of an
update, measured and predicted by the chip's published rates, and the second by the first; the verdict at 2 %.
Exit code 1 when a row that was measured is off by more, or failed. On a CPU the grid is `cpu`, the measured figure is
what the process grew by, and nothing is judged.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rows as shared
from rows import TOLERANCE, Row, error_of, gib, line_of, reason, verdict

MIB = 2**20
# Blocks of a grid: configs, policies, precisions, accumulations ("4": MultiSteps, "4:scan": inside the step).
Block = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
GRIDS: Mapping[str, tuple[Block, ...]] = {
    "default": (
        (("gpt2_small", "llama_1b"), ("none", "selective", "full"), ("fp32", "bf16", "bf16_params"), ("1", "4:scan")),
        (("llama_8b",), ("full",), ("bf16", "bf16_grads", "bf16_params"), ("1", "4")),
    ),
    "short": ((("gpt2_small", "llama_1b"), ("none", "full"), ("bf16",), ("1", "4:scan")),),
    "cpu": ((("tiny",), ("none", "full"), ("fp32", "bf16"), ("1", "2:scan")),),
}
ONCE = {"batch.accumulation": "1", "train.sample_tokens": "0"}
TIMED = 12  # updates of a row; the median leaves the first two out


def timed_row(name: str, config: str, **keys: str) -> Row:
    """A row whose updates are timed; in keyword names, __ stands for the dot of a key."""
    return Row(name, config, {**ONCE, **{key.replace("__", "."): value for key, value in keys.items()}}, TIMED)


def policy_rows(name: str, config: str, policies: Sequence[str], **keys: str) -> list[Row]:
    """A row of a config for each remat policy."""
    return [timed_row(f"{name} {policy}", config, remat__policy=policy, **keys) for policy in policies]


POLICIES = ("none", "full", "selective", "megatron", "minimal", "dots", "dots_no_batch", "sqrt", "offload")
LEAN = {"precision__preset": "bf16_params", "optimizer__fused_backward": "true", "optimizer__clip": "layer"}
FOUR = {"batch__accumulation": "4", "batch__micro": "16"}
MOE = {"model__n_layers": "2", "optimizer__name": "adamw", "data__seq_len": "4096"}
# Rows with names of their own. Scanned layers unless the name says unrolled; --grid=policies measures all.
POLICY_ROWS: tuple[Row, ...] = (
    *policy_rows("gpt2_small unrolled", "gpt2_small", (*POLICIES, "offload_dots"), batch__micro="16"),
    *policy_rows("gpt2_small", "gpt2_small", ("none", "full", "selective"), batch__micro="16", model__unroll="1"),
    timed_row("gpt2_small fp32", "gpt2_small", batch__micro="16", precision__preset="fp32"),
    *policy_rows("llama_1b", "llama_1b", POLICIES),
    *policy_rows("llama_1b unrolled", "llama_1b", ("minimal", "selective", "full"), model__unroll="16"),
    timed_row("llama_1b full loss", "llama_1b", remat__policy="full", loss__kind="full"),
    timed_row("llama_1b naive attention", "llama_1b", model__attention="naive", data__seq_len="2048"),
    timed_row("llama_1b fp8", "llama_1b", precision__preset="fp8"),
    timed_row("gpt2_medium", "gpt2_medium", batch__micro="16"),
    timed_row("gpt2_xl", "gpt2_xl"),
    timed_row("gpt2_xl full", "gpt2_xl", remat__policy="full"),
    timed_row("llama_8b 4096 bf16 state", "llama_8b", data__seq_len="4096", optimizer__name="adamw_bf16", **LEAN),
    timed_row("llama_8b 8192 adafactor", "llama_8b", optimizer__name="adafactor", **LEAN),
    timed_row("llama_8b_qlora", "llama_8b_qlora"),
    timed_row("mixtral, 2 layers, grouped", "mixtral_8x7b", mesh__expert="1", mesh__fsdp="1", **MOE),
    timed_row("qwen3_30b_a3b, 2 layers", "qwen3_30b_a3b", mesh__expert="1", mesh__fsdp="1", **MOE),
    timed_row("tiny", "tiny"),
    timed_row("tiny_moe", "tiny_moe"),
    timed_row("char", "char"),
    timed_row("gpt2_small x4 scan", "gpt2_small", batch__accumulation="4", batch__mode="scan", batch__micro="16"),
    timed_row(
        "gpt2_small x4 MultiSteps", "gpt2_small", batch__accumulation="4", batch__mode="multisteps", batch__micro="16"
    ),
)
NAMED: Mapping[str, tuple[Row, ...]] = {"policies": POLICY_ROWS}
PARTS = ("configs", "policies", "precisions", "accumulations")
WIDTHS = (46, 8, 9, 8, 7, 8, 8, 9, 6)
HEADINGS = ("row", "compiler", "predicted", "measured", "error %", "outside", "ms", "predicted", "ratio", "verdict")


def row_of(config: str, policy: str, precision: str, accumulation: str) -> Row:
    """A row of the grid. Raises ValueError for an accumulation that is none."""
    count, _, mode = accumulation.partition(":")
    if not count.isdigit() or mode not in ("", "scan", "multisteps"):
        raise ValueError(f"accumulation {accumulation}: write a number of micro-steps, or 4:scan")
    keys = {
        "remat.policy": policy,
        "precision.preset": precision,
        "batch.accumulation": count,
        "batch.mode": mode or "multisteps",
        "train.sample_tokens": "0",
    }
    return Row(f"{config} {policy} {precision} x{accumulation}", config, keys)


def rows_of(grid: str, chosen: Mapping[str, str | None]) -> list[Row]:
    """The rows of a grid of GRIDS, with the parts that `chosen` names in the place of the grid's own; none twice."""
    names = [text.split(",") if text else None for text in (chosen[part] for part in PARTS)]
    made = [
        row_of(*values)
        for block in GRIDS[grid]
        for values in itertools.product(*(given or own for given, own in zip(names, block)))
    ]
    return list({row.name: row for row in made}.values())


def outside(answer: Mapping[str, Any]) -> int | None:
    """Bytes of the card outside the allocator's pool: context, libraries, other processes; None where unknown."""
    if answer.get("card") is None or not answer.get("pool"):
        return None
    return answer["card"] - answer["pool"]


def cells(row: Row, answer: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    error, apart = error_of(answer), outside(answer)
    unmeasured = "compiles" if answer.get("fits", True) else "compiles, does not fit"
    return [
        row.name,
        gib(answer.get("allocated"), 3),
        gib(answer.get("predicted"), 3),
        gib(answer.get("measured"), 3),
        "" if error is None else f"{100 * error:+.2f}",
        "" if apart is None else f"{apart / MIB:.0f}",
        *seconds_cells(answer),
        reason(answer) or verdict(answer) or ("not judged" if "measured" in answer else unmeasured),
    ]


def step_seconds(answer: Mapping[str, Any]) -> float | None:
    """Median measured seconds of an update without the first two; None where fewer than five ran."""
    taken = answer.get("seconds") or []
    return statistics.median(taken[2:]) if len(taken) >= 5 else None


def seconds_cells(answer: Mapping[str, Any]) -> list[str]:
    """Of an update: measured and predicted milliseconds, and predicted by measured."""
    taken, said = step_seconds(answer), (answer.get("prediction") or {}).get("seconds")
    return [
        f"{1e3 * taken:.2f}" if taken else "",
        f"{1e3 * said:.2f}" if said else "",
        f"{said / taken:.3f}" if taken and said else "",
    ]


def summary(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many rows were measured, how many are right, the median and the worst error."""
    errors = [error for error in map(error_of, answers) if error is not None]
    if not errors:
        predicted = sum("predicted" in answer for answer in answers)
        return [f"{predicted} of {len(answers)} rows compiled and predicted, none judged"]
    right, close = (sum(abs(error) <= most for error in errors) for most in (TOLERANCE, TOLERANCE / 2))
    return [
        f"{len(errors)} rows measured: {right} within 2 %, {close} within 1 %; median error "
        f"{100 * statistics.median(errors):+.2f} %, worst {100 * max(errors, key=abs):+.2f} %"
    ]


# What a row says of an item, in bytes, where it can: item of peak/runtime_overheads.py -> answer -> measured.
ITEMS: Mapping[str, Callable[[Mapping[str, Any]], int | None]] = {
    "context": outside,
    "pool, beside the compiler's": lambda answer: _residual(answer, "allocated"),
    "pool, beside the prediction": lambda answer: _residual(answer, "predicted"),
}


def _residual(answer: Mapping[str, Any], of: str) -> int | None:
    judged = error_of(answer) is not None and verdict(answer) != "tuning" and answer.get("program", "step") == "step"
    return answer["measured"] - answer[of] if judged else None


def calibrate(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the measured rows say of the runtime's overheads: median and range of each item, how the residual goes with
    the items' own figures (least squares), and the line to put into memory/devices/chips.py."""
    lines = []
    for name, ask in ITEMS.items():
        seen = [size for size in map(ask, answers) if size is not None]
        if seen:
            low, middle, high = (f"{size / MIB:.2f}" for size in (min(seen), statistics.median(seen), max(seen)))
            lines.append(f"{name}: median {middle} MiB, {low} to {high}, {len(seen)} rows")
    lines += _slopes(answers)
    apart = [size for size in map(outside, answers) if size is not None]
    if apart:
        last = [answer for answer in answers if outside(answer) is not None][-1]
        kind, jax = last["device"], last["versions"]["jax"]
        lines.append(
            f"for memory/devices/chips.py: CONTEXT_BYTES = {round(statistics.median(apart) / MIB)} * MIB"
            f"  # {kind}, jax {jax}, {len(apart)} rows"
        )
    return lines or ["nothing measured yet that calibrates anything"]


def _slopes(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Least squares of (measured - compiler's) on the items in the pool and a constant: 1 is what an item promises."""
    import numpy as np

    known = [(answer, _residual(answer, "allocated")) for answer in answers]
    known = [(answer, size) for answer, size in known if size is not None]
    table = [
        {item["name"]: item["bytes"] for item in answer["runtime_overheads"] if item["where"] == "pool"}
        for answer, _ in known
    ]
    names = sorted({name for items in table for name in items})
    columns = {name: [items.get(name, 0) for items in table] for name in names}
    moving = [name for name in names if len(set(columns[name])) > 1]
    if len(known) < len(moving) + 2:
        return []
    left = np.array([[1.0] * len(known), *(columns[name] for name in moving)]).T
    found, _, rank, _ = np.linalg.lstsq(left, np.array([float(size) for _, size in known]), rcond=None)
    if rank < left.shape[1]:
        return ["least squares: the rows do not tell the items apart"]
    slopes = ", ".join(f"{name} x {slope:.2f}" for name, slope in zip(moving, found[1:]))
    return [f"least squares: {found[0] / MIB:.2f} MiB" + (f" + {slopes}" if slopes else "")]


def options() -> tuple[argparse.Namespace, list[Row]]:
    """The command line; a mistake is one line."""
    flags = shared.options_of(__doc__, "runs/accuracy.jsonl")
    flags.add_argument(
        "--grid", choices=(*GRIDS, *NAMED), help="rows (default: default, or cpu where there is no card)"
    )
    flags.add_argument("--only", nargs="+", metavar="TEXT", help="of --grid=policies, rows whose name contains a text")
    for part in PARTS:
        flags.add_argument(f"--{part}", metavar="A,B", help="in the place of the grid's")
    flags.add_argument("--calibrate", action="store_true", help="run nothing: read --out and say what it calibrates")
    asked = flags.parse_args()
    shared.check(flags, asked)
    from bytescope.memory.devices.platform import accelerator

    if asked.grid in NAMED:
        return asked, [row for row in NAMED[asked.grid] if any(text in row.name for text in asked.only or [""])]
    grid = asked.grid or ("default" if asked.compile_only or accelerator() == "cuda" else "cpu")
    try:
        return asked, rows_of(grid, vars(asked))
    except ValueError as error:
        flags.error(str(error))


def main() -> int:
    asked, rows = options()
    try:
        store = shared.Store(asked.out, shared.stamp())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if asked.calibrate:
        print("\n".join(calibrate(list(store.done.values()))))
        return 0
    print(f"{len(rows)} rows, GiB; outside the pool in MiB; kept in {asked.out}\n{line_of(HEADINGS, WIDTHS)}")
    found = [
        answer for _, answer in shared.work(rows, asked, store, lambda row, answer: line_of(cells(row, answer), WIDTHS))
    ]
    print("\n".join([*summary(found), *calibrate(found)] if found else []))
    return int(any("failed" in answer or verdict(answer) == "WRONG" for answer in found))


if __name__ == "__main__":
    sys.exit(main())
