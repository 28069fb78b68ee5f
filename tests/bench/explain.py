"""Scores `memory.explain` on a folder of out-of-memory messages with an index of what each message says.

    python tests/bench/explain.py --corpus=DIR                  # the table and every failure
    python tests/bench/explain.py --corpus=DIR --assert         # exit 1 if a measured figure misses its bar
    python tests/bench/explain.py --corpus=DIR --cuts           # also every start and every end of each message
    python tests/bench/explain.py --corpus=DIR --splices=10000  # also random splices of messages
    python tests/bench/explain.py --corpus=DIR --speed          # also seconds for 50 MB of log

DIR holds index.csv and a file ID.txt for each row of the index. A row whose file is missing is listed and not scored.
The reader is developed on even ids; odd ids are the check, and only their figures have bars. The cause kinds of
`CAUSE_IDS` were assigned from the columns of the index, before the reader existed and without the messages.

Five figures are compared: the kind of the message; the requested, limit and total bytes, which must equal the index
exactly and be None where the index is empty; and the kind of the cause. `--cuts` and `--splices` count texts for which
the explanation, its JSON or its printed form raises an exception. `--speed` times a training log with a message every
2,000 lines, which has a bar, and a log of messages only, which has none.
"""

import argparse
import csv
import dataclasses
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bytescope import memory

# Smallest share of odd ids that must be right, by figure.
BARS = {"kind": 1.0, "requested_bytes": 0.98, "limit_bytes": 0.98, "total_bytes": 0.98, "cause_kind": 0.8}
BYTE_FIELDS = ("requested_bytes", "limit_bytes", "total_bytes")
MAX_SECONDS, LOG_BYTES = 1.0, 50_000_000
ORDINARY_LINES, ORDINARY_LINE = 2_000, "I1124 18:46:{:02}.123456 step {} loss 2.{:04} grad_norm 0.71 tokens/s 118273\n"
MAX_SHOWN = 20

# Cause kind -> ids, from the index alone. The first clause of `cause` that names one cause decides; a guess with
# alternatives does not. A row of kind "plain" or with "head line only" whose message holds no more than a size is
# "unknown", whatever the thread found later: a correct reader says so.
CAUSE_IDS = {
    # Activations kept for the backward pass, or more activations than the budget.
    "saved_activations": "002 010 020 035 064 071 072",
    "attention_scores": "022",
    # Activations of one large input, or one tensor larger than the device.
    "large_tensor": "005 006 007 011 032 036 088 106",
    "padding": "013 014 015 018",
    "outputs": "004 062 063",
    # Parameters, optimizer state or a copy of them; arguments and results alone exceed the limit.
    "weights_and_state": "023 068 102 105 107",
    # A tensor held whole although it is or will be sharded.
    "replicated_tensor": "008 073 077 078 079",
    "captured_constant": "097 098 100",
    "unusable_donation": "092 094 096",
    # Live arrays and loaded programs hold the memory; the failed request is not the culprit.
    "device_full": "001 009 058 060 103 104",
    "fragmentation": "038 056 059 061",
    "other_process": "033",
    # NCCL, cuDNN, and workspace of autotuning.
    "outside_pool": "051 080 087 089 091",
    # Pinned host buffers and the CPU backend.
    "host_memory": "082 084 086 108",
    # vmem and smem.
    "on_chip_memory": "027 028 029 030 031",
    # No failure, a harmless size, or a failure that the log does not ascribe to memory.
    "no_memory_problem": "041 052 069 076 081",
    "unknown": "025 037 042 044 045 046 048 049 053 054 101",
}
CAUSE_KINDS = {row: cause for cause, rows in CAUSE_IDS.items() for row in rows.split()}
# The kinds of the index's bin "newer": compile-time TPU errors, run-time errors, and the base limit of the scheduler.
NEWER_IDS = {"tpu_hbm": "101 102 105 106", "plain": "103 104 108", "remat_warning": "107"}
NEWER_KINDS = {row: kind for kind, rows in NEWER_IDS.items() for row in rows.split()}

Explain = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of the corpus.

    expected: figure -> the value of the index; bytes are int, or None where the index is empty. The kind or the cause
    kind is missing if the tables of this script do not have the id.
    """

    id: str
    text: str
    expected: dict[str, str | int | None]

    @property
    def odd(self) -> bool:
        return int(self.id) % 2 == 1


@dataclasses.dataclass(frozen=True)
class Failure:
    """A figure of a message that differs from the index."""

    id: str
    figure: str
    expected: str | int | None
    found: str | int | None

    def __str__(self) -> str:
        return f"{self.id}  {self.figure:<15}  expected {self.expected}, found {self.found}"


def read_corpus(folder: Path) -> tuple[list[Message], list[str]]:
    """Returns the messages of `folder`, and the ids of the index that have no message file."""
    messages, missing = [], []
    with (folder / "index.csv").open(encoding="utf-8", newline="") as index:
        for row in csv.DictReader(index):
            path = folder / f"{row['id']}.txt"
            if not path.exists():
                missing.append(row["id"])
                continue
            expected: dict[str, str | int | None] = {
                field: int(row[field]) if row[field] else None for field in BYTE_FIELDS
            }
            if row["kind"] != "newer":
                expected["kind"] = row["kind"]
            elif row["id"] in NEWER_KINDS:
                expected["kind"] = NEWER_KINDS[row["id"]]
            if row["id"] in CAUSE_KINDS:
                expected["cause_kind"] = CAUSE_KINDS[row["id"]]
            messages.append(Message(row["id"], path.read_text(encoding="utf-8", errors="replace"), expected))
    return messages, missing


def find_failures(message: Message, explain: Explain) -> list[Failure]:
    """Returns the figures of `message` that `explain` gets wrong; if it raises, every figure is wrong."""
    try:
        explanation = explain(message.text)
        found = {figure: getattr(explanation, figure) for figure in message.expected}
    except Exception as error:
        found = dict.fromkeys(message.expected, repr(error))
    return [
        Failure(message.id, figure, expected, found[figure])
        for figure, expected in message.expected.items()
        if found[figure] != expected
    ]


def report_half(name: str, messages: list[Message], explain: Explain, with_bars: bool) -> bool:
    """Prints the figures and failures of one half of the corpus. Returns whether every figure reaches its bar."""
    failures = [failure for message in messages for failure in find_failures(message, explain)]
    reached = True
    print(f"{name} ids: {len(messages)} messages")
    for figure, bar in BARS.items():
        total = sum(figure in message.expected for message in messages)
        right = total - sum(failure.figure == figure for failure in failures)
        line = f"  {figure:<15} {right:>3} of {total:<3} {100 * right / max(1, total):6.1f} %"
        if with_bars:
            reached &= right >= bar * total
            line += f"   bar {100 * bar:.0f} %{'' if right >= bar * total else '   MISSED'}"
        unscored = len(messages) - total
        print(line + (f"   {unscored} not in the table" if unscored else ""))
    for failure in failures:
        print(f"  {failure}")
    return reached


def cuts(messages: list[Message], step: int) -> Iterator[tuple[str, str]]:
    """Yields (name, text): each message without its end and without its start, at every `step`-th character."""
    for message in messages:
        for at in range(0, len(message.text) + 1, step):
            yield f"{message.id}[:{at}]", message.text[:at]
            yield f"{message.id}[{at}:]", message.text[at:]


def splices(messages: list[Message], number: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yields (name, text): two to four random slices of random messages, joined by nothing, a blank or a line end."""
    chance = random.Random(seed)
    for count in range(number):
        names, text = [], ""
        for _ in range(chance.randint(2, 4)):
            message = chance.choice(messages)
            start, stop = sorted(chance.randint(0, len(message.text)) for _ in range(2))
            names.append(f"{message.id}[{start}:{stop}]")
            text += message.text[start:stop] + chance.choice(("", " ", "\n"))
        yield f"splice {count}: {' + '.join(names)}", text


def report_exceptions(name: str, texts: Iterable[tuple[str, str]], explain: Explain) -> bool:
    """Prints how many texts raise an exception, and the first of them. Returns whether there are none."""
    total, raised = 0, []
    began = time.process_time()
    for label, text in texts:
        total += 1
        try:
            explanation = explain(text)
            json.dumps(explanation.to_json())
            str(explanation)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raised.append(f"{label}: {error!r} at {Path(frame.filename).name}:{frame.lineno}")
    print(f"{name}: {len(raised)} exceptions in {total:,} texts, {time.process_time() - began:.0f} CPU seconds")
    for line in raised[:MAX_SHOWN]:
        print(f"  {line}")
    return not raised


def build_log(messages: list[Message], ordinary_lines: int) -> str:
    """Returns a log of `LOG_BYTES` characters: the messages in turn, each after `ordinary_lines` lines of training."""
    parts, size, turn = [], 0, 0
    while size < LOG_BYTES:
        lines = [
            ORDINARY_LINE.format(line % 60, turn * ordinary_lines + line, line % 10_000)
            for line in range(ordinary_lines)
        ]
        parts += [*lines, messages[turn % len(messages)].text, "\n"]
        size += sum(map(len, lines)) + len(parts[-2]) + 1
        turn += 1
    return "".join(parts)[:LOG_BYTES]


def report_speed(messages: list[Message], explain: Explain) -> bool:
    """Prints the CPU seconds for two logs of 50 MB, the best of three. Returns whether the training log's reach 1 s."""
    reached = True
    for name, ordinary_lines, bar in (("training log", ORDINARY_LINES, MAX_SECONDS), ("messages only", 0, None)):
        log, seconds = build_log(messages, ordinary_lines), []
        for _ in range(3):
            began = time.process_time()
            explain(log)
            seconds.append(time.process_time() - began)
        missed = bar is not None and min(seconds) > bar
        reached &= not missed
        line = f"{name}, {LOG_BYTES / 1e6:.0f} MB: {min(seconds):.2f} CPU seconds"
        print(line + ("" if bar is None else f", bar {bar:g} s") + ("   MISSED" if missed else ""))
    return reached


def main() -> int:
    """Prints the scores; returns 1 if --assert is given and a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder with index.csv and ID.txt files")
    parser.add_argument(
        "--cuts", type=int, nargs="?", const=1, metavar="STEP", help="cut messages at every STEP-th character (1)"
    )
    parser.add_argument("--splices", type=int, default=0, metavar="N", help="number of random splices (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the splices (default 0)")
    parser.add_argument("--speed", action="store_true", help="time 50 MB of log")
    parser.add_argument("--assert", dest="check", action="store_true", help="exit 1 if a bar is missed")
    args = parser.parse_args()
    if not (args.corpus / "index.csv").exists():
        parser.error(f"{args.corpus} has no index.csv; name the folder of the messages")
    messages, missing = read_corpus(args.corpus)
    if not messages:
        parser.error(f"{args.corpus} has no message file of its index; files are named ID.txt")
    if missing:
        print(f"no message file, not scored: {' '.join(missing)}")
    report_half("even", [message for message in messages if not message.odd], memory.explain, with_bars=False)
    reached = report_half("odd", [message for message in messages if message.odd], memory.explain, with_bars=True)
    if args.cuts:
        reached &= report_exceptions("cuts", cuts(messages, args.cuts), memory.explain)
    if args.splices:
        reached &= report_exceptions("splices", splices(messages, args.splices, args.seed), memory.explain)
    if args.speed:
        reached &= report_speed(messages, memory.explain)
    return int(args.check and not reached)


if __name__ == "__main__":
    sys.exit(main())
