"""The frontier of one card: the largest model with full parameters, and the longest context for 8B.

    python tests/gpu/frontier.py                             # both ladders, upward until a row fails; again: it resumes
    python tests/gpu/frontier.py --ladder=parameters --steps=10
    python tests/gpu/frontier.py --ladder=context --steps=2 --timeout=7200
    python tests/gpu/frontier.py --compile-only --target=h200          # what every row takes, without a card
    python tests/gpu/frontier.py --toy                                 # a dry run of all of it, on any machine

A rung is a config with its levers; each runs in a process of its own, the trainer's step on random tokens, ten updates
(two from 300,000 tokens on, where an update takes minutes, unless --steps says). Columns: parameters or tokens; the
peak that is predicted, of the step, of init and of evaluation, whichever is most, and the allocator's (GiB); bytes in
pinned host memory; seconds an update, the median without the first two; tokens a second; first and last loss. A ladder
ends at the first rung that does not fit or fails; rungs that only lack host memory are passed over. Exit code 1 when a
rung failed that was predicted to fit, or a loss is not finite.
"""

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import rows as shared
from rows import Row, gib, line_of, reason

FUSED = {"optimizer.fused_backward": "true", "optimizer.clip": "layer"}
LEAN = {**FUSED, "precision.preset": "bf16_params", "optimizer.name": "adafactor"}
EIGHT = {**FUSED, "optimizer.name": "adamw_8bit"}
SPILLED = {"remat.policy": "offload", "model.max_seq_len": "1048576"}


# A row with its levers, and the programs beside the step compiled too.
Rung = partial(Row, steps=10, others=True)
LONG = 2  # updates of a rung whose update takes minutes


def _layers(count: int, **keys: str) -> dict[str, str]:
    return {"model.n_layers": str(count), **keys}


def _tokens(count: int, tile: int = 0) -> dict[str, str]:
    return {"data.seq_len": str(count), "model.mlp_chunk": str(tile)}


# Upward. 70B's layers: 0.856e9 parameters each, 2.1e9 beside them.
LADDERS: Mapping[str, tuple[Row, ...]] = {
    "parameters": (
        Rung("12.4B bf16_params adafactor", "llama_70b", _layers(12) | LEAN),
        Rung("30.3B bf16_params adafactor", "llama_70b", _layers(33) | LEAN),
        Rung(
            "30.3B AdamW, optimizer on the host",
            "llama_70b",
            _layers(33) | FUSED | {"precision.preset": "bf16_params", "offload.optimizer": "true"},
        ),
        Rung("32.9B bf16_params adafactor", "llama_70b", _layers(36) | LEAN),
        Rung("56.9B bf16_params adafactor", "llama_70b", _layers(64) | LEAN),
        Rung(
            "70.6B bf16_params adafactor, params on the host",
            "llama_70b",
            _layers(80) | LEAN | {"offload.params": "true"},
        ),
    ),
    "context": (
        Rung("32,768 tokens", "llama_8b", _tokens(32_768) | FUSED),
        Rung("131,072 tokens", "llama_8b", _tokens(131_072) | EIGHT),
        Rung("300,000 tokens", "llama_8b", _tokens(300_000, 4000) | FUSED | SPILLED, steps=LONG),
        Rung("524,288 tokens", "llama_8b", _tokens(524_288, 4096) | EIGHT | SPILLED, steps=LONG),
        Rung("1,048,576 tokens", "llama_8b", _tokens(1_048_576, 4096) | EIGHT | SPILLED, steps=LONG),
    ),
}
# What a dry run cuts every rung to; layers by LAYERS, tokens and tiles by TOKENS.
TOY = {
    "model.d_model": "32",
    "model.n_heads": "4",
    "model.n_kv_heads": "2",
    "model.d_head": "8",
    "model.d_ff": "64",
    "model.vocab_size": "128",
    "model.vocab_multiple": "1",
    "loss.chunk": "64",
}
LAYERS, TOKENS, LENGTH = 12, 32_000, 32
WIDTHS = (48, 8, 9, 8, 7, 8, 9, 15)
HEADINGS = ("rung", "1e9", "predicted", "measured", "host", "s", "tokens/s", "loss", "")


def toy(keys: Mapping[str, str]) -> dict[str, str]:
    """The same levers over a tiny model and few tokens."""
    cut = {"model.n_layers": "2", "data.seq_len": str(LENGTH), **keys, **TOY}
    cut["model.n_layers"] = str(max(int(cut["model.n_layers"]) // LAYERS, 2))
    if "data.seq_len" in keys:
        tile = LENGTH if int(keys["model.mlp_chunk"]) else 0
        cut |= {"data.seq_len": str(max(int(keys["data.seq_len"]) // TOKENS, 1) * LENGTH), "model.mlp_chunk": str(tile)}
    return cut


def row_of(rung: Row, steps: int | None = None, *, dry: bool = False) -> Row:
    """The request of a rung; `steps` in the place of its own, `dry` for the tiny one."""
    keys = {**(toy(rung.keys) if dry else rung.keys), "train.sample_tokens": "0"}
    return dataclasses.replace(rung, keys=keys, steps=steps or (3 if dry else rung.steps))


def seconds_of(answer: Mapping[str, Any]) -> float | None:
    """Median seconds of an update, without the first two where there are more."""
    taken = answer.get("seconds")
    return statistics.median(taken[2:] or taken[-1:]) if taken else None


def finite(answer: Mapping[str, Any]) -> bool:
    """Whether every loss is a number."""
    return all(math.isfinite(loss) for loss in answer.get("losses", ()))


def cells(row: Row, answer: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    taken, losses = seconds_of(answer), answer.get("losses") or []
    size = f"{answer['parameters'] / 1e9:.1f}" if "parameters" in answer else ""
    told = reason(answer) or ("" if finite(answer) else "LOSS NOT FINITE")
    fits = answer.get("fits")
    told = told or (f"{answer['program']} peaks" if answer.get("program", "step") != "step" else "")
    return [
        row.name,
        size,
        gib(answer.get("predicted")),
        gib(answer.get("measured")),
        gib(answer.get("host"), 1),
        f"{taken:.2f}" if taken else "",
        f"{answer['tokens'] / taken:,.0f}" if taken else "",
        f"{losses[0]:.3f} {losses[-1]:.3f}" if losses else "",
        told or (f"{len(losses)} updates" if losses else "fits" if fits else "does not fit"),
    ]


def last(answer: Mapping[str, Any]) -> bool:
    """Whether a ladder ends here: a rung that failed, cannot run or does not fit, but not for want of host memory."""
    return "failed" in answer or "cannot" in answer or answer.get("fits") is False or not finite(answer)


def reached(answers: list[tuple[Row, dict[str, Any]]]) -> str:
    """The highest rung that ran to its end, in a sentence."""
    done = [(row, answer) for row, answer in answers if answer.get("losses") and finite(answer)]
    if not done:
        fitting = [row.name for row, answer in answers if answer.get("fits")]
        return f"fits by compile: {fitting[-1]}" if fitting else "no rung fits"
    row, answer = done[-1]
    return (
        f"reached: {row.name}, {answer['parameters'] / 1e9:.1f}e9 parameters, {answer['tokens']:,} tokens, "
        f"{len(answer['losses'])} updates on {answer['device']}"
    )


def options() -> argparse.Namespace:
    """The command line; a mistake is one line."""
    flags = shared.options_of(__doc__, "runs/frontier.jsonl")
    flags.set_defaults(timeout=3600.0)
    flags.add_argument("--ladder", choices=LADDERS, help="one alone (default: both)")
    flags.add_argument("--steps", type=int, metavar="N", help="updates of every rung (default: its own)")
    flags.add_argument("--toy", action="store_true", help="a dry run: the same rungs, tiny")
    asked = flags.parse_args()
    if asked.steps is not None and asked.steps < 1:
        flags.error(f"--steps={asked.steps}: give 1 or more")
    shared.check(flags, asked)
    return asked


def main() -> int:
    asked, bad = options(), False
    try:
        store = shared.Store(asked.out, shared.stamp())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, rungs in LADDERS.items():
        if asked.ladder in (None, name):
            print(f"{name}: GiB, kept in {asked.out}\n{line_of(HEADINGS, WIDTHS)}")
            found = shared.work(
                (row_of(rung, asked.steps, dry=asked.toy) for rung in rungs),
                asked,
                store,
                lambda row, answer: line_of(cells(row, answer), WIDTHS),
                last,
            )
            print(reached(found))
            bad |= any("failed" in answer or not finite(answer) for _, answer in found)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
