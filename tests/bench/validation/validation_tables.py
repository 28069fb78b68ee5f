"""Prints the tables of the Playbook in README.md from the JSON of validate.py.

    python tests/bench/validation/validate.py --set=playbook --folder=DIR --json=playbook.json
    python tests/bench/validation/validation_tables.py playbook.json

Compiles nothing. The first table of a part has the level and the bytes, the next have the order: for all runs, and for
the runs that we claim to predict. A fraction of pairs in bold is below the fraction of a way to sort the runs. The last
tables have nanotron's bytes by the size of the tensor-parallel group (nanotron_bytes.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import measured_rows
import nanotron_bytes
import setups_playbook

Record = Mapping[str, Any]
LEVEL = (
    "model, GPUs | runs | median | all | within | claimed | median | all | within | free | bytes | all | at or below"
)
ORDER = "model, GPUs | pairs | right | tp | tp, mb | tp, pp, mb | claimed | right | tp | tp, mb | tp, pp, mb"
BYTES = "run | split | rows | ours | with terms | sum | flattened | wait for NCCL | sum to maximum"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}".replace("%", "")


def level(score: Record) -> str:
    if not score["rows"]:
        return "0 | | |"
    ends = f"{score['least']:.2f} to {score['most']:.2f}"
    return f"{score['rows']} | {score['median']:.2f} | {ends} | {percent(score['within'])}"


def order(pairs: Record | None) -> str:
    if not pairs or not pairs["count"]:
        return "0 | | | |"
    mark = "**" if max(pairs["sorted_by"].values()) > pairs["right"] else ""
    by = " | ".join(map(percent, pairs["sorted_by"].values()))
    return f"{pairs['count']} | {mark}{percent(pairs['right'])}{mark} | {by}"


def table(heading: str, lines: Iterable[str]) -> None:
    print(f"\n| {heading} |\n|{'---|' * (heading.count('|') + 1)}")
    for line in lines:
        print(f"| {line} |")


def print_groups(groups: Sequence[Record], staged: bool) -> None:
    some = sorted((one for one in groups if one["staged"] == staged), key=lambda one: one["gpus"])
    print(f"\n## {'in' if staged else 'without'} stages")
    lines = []
    for one in some:
        score = one["all"]
        free = f"{score['free_median']:.2f} ({score['free_rows']})" if score["free_rows"] else ""
        sizes = f"{score['bytes_median']:.2f} | {score['bytes_least']:.2f} to {score['bytes_most']:.2f}"
        levels = f"{level(score)} | {level(one['claimed'])}"
        lines.append(f"{one['model']}, {one['gpus']} | {levels} | {free} | {sizes} | {percent(score['bytes_below'])}")
    table(LEVEL, lines)
    for part in ("pairs", "across") if staged else ("pairs",):
        print(f"\n{part}")
        table(
            ORDER,
            (
                f"{one['model']}, {one['gpus']} | {order(one['order'][part])} | {order(one['claimed_order'][part])}"
                for one in some
            ),
        )


def print_pooled(rows: Sequence[Record]) -> None:
    """Prints the level over all models, by number of GPUs and by the reason why a run is not claimed."""
    print("\n## all models\n")
    names: dict[str, list[float]] = {}
    for row in rows:
        part = f"{'in' if row['stages'] > 1 else 'without'} stages"
        keys = [part, f"{part}, {row['gpus']} GPUs", row["not_claimed"] or f"{part}, claimed"]
        for key in (*keys, "all", "" if row["not_claimed"] else "claimed"):
            names.setdefault(key, []).append(row["ratio"])
    for key, ratios in sorted(names.items()):
        if key:
            good = sum(0.85 <= ratio <= 1.15 for ratio in ratios) / len(ratios)
            print(f"{len(ratios):4} median {statistics.median(ratios):.2f} within {good:.1%}  {key}")


def print_bytes(rows: Sequence[Record]) -> None:
    facts = {f"{number}": fact for number, fact in enumerate(measured_rows.facts("playbook"))}
    old = {f"old{number}": fact for number, fact in enumerate(measured_rows.facts("old_bench"))}
    groups: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for row in rows:
        if row["stages"] > 1 or not row["bytes_ratio"]:
            continue
        recent = row["id"] in facts
        fact = facts[row["id"]] if recent else old[row["id"]]
        shape = setups_playbook.SHAPES[fact["model"]] if recent else setups_playbook.OLD_SHAPE
        vocab = int(row["overrides"]["model.vocab_size"])
        run = setups_playbook.nanotron_run(fact, shape, vocab, asynchronous=recent)
        measured = row["measured_bytes"]
        allocated = nanotron_bytes.total(nanotron_bytes.terms(run))
        more = {term.name: term.bytes for term in nanotron_bytes.reserved_terms(run)}
        flattened, waiting = more.get("flattened float32 gradients", 0), more.get("freed tensors that wait for NCCL", 0)
        inside = allocated <= measured <= allocated + flattened + waiting
        parts = (row["allocated_bytes"], row["bytes_ratio"] * measured, allocated, flattened, waiting)
        shares = tuple(part / measured for part in parts)
        groups.setdefault((row["bytes_are"], run.tensor), []).append((*shares, inside))
    lines = []
    for (kind, split), some in sorted(groups.items()):
        columns = list(zip(*some, strict=True))
        texts = [f"{statistics.median(column):.2f}, {min(column):.2f} to {max(column):.2f}" for column in columns[:3]]
        texts += [f"{statistics.median(column):.2f}" for column in columns[3:5]]
        lines.append(f"{kind} | {split} | {len(some)} | {' | '.join(texts)} | {sum(columns[5]):.0f} of {len(some)}")
    table(BYTES, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="the file that validate.py --json=FILE has written")
    result = json.loads(parser.parse_args().json.read_text(encoding="utf-8"))
    for staged in (False, True):
        print_groups(result["groups"], staged)
    print_pooled([row for row in result["rows"] if row["ratio"]])
    print_bytes(result["rows"])


if __name__ == "__main__":
    main()
