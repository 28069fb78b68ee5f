"""`bytescope score`: log-probabilities and perplexity of texts under the model of a run or a folder."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bytescope.memory.commands.arguments import Parser, check_files, user_path, write
from bytescope.train.generate import generate_flags
from bytescope.train.user_errors import UserError

if TYPE_CHECKING:
    from bytescope.train.generate.model_source import Source
    from bytescope.train.generate.score import ScoredText

EPILOG = """\
examples:
  bytescope score runs/mine --text="def train(model):"
  bytescope score smollm/ --texts=held_out.txt
  bytescope score smollm/ --texts=rows.jsonl --out=scores.jsonl

Rows of a .jsonl file hold text, tokens or messages; any other file is one text.
A text longer than --length is scored in windows of it, each from its own
beginning. Perplexity is exp of the mean of -log p over all tokens but the
first of each window.
exit codes: 0 done, 2 a mistake, 3 does not fit, 130 stopped by Ctrl-C"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = Parser(
        prog="bytescope score",
        allow_abbrev=False,
        epilog=EPILOG,
        usage="%(prog)s RUN_OR_FOLDER --text=TEXT | --texts=FILE [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show the log-probabilities and perplexity of texts.",
    )
    generate_flags.add_model(parser)
    parser.add_argument("--text", help="score this one, token by token")
    parser.add_argument(
        "--texts",
        type=user_path,
        metavar="FILE",
        help="score each row of a file of JSON lines, or a file of text as a whole",
    )
    parser.add_argument(
        "--out", type=user_path, metavar="FILE", help="write a row of JSON for each text: tokens, logprobs, perplexity"
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked. Raises ValueError with an `exit_code` for a mistake in it."""
    args = make_parser().parse_args(argv)
    generate_flags.check(args)
    if (args.text is None) == (args.texts is None):
        raise UserError("give --text=TEXT or --texts=FILE")
    check_files(args, ("out",))
    return args


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    generate_flags.start_devices(args)
    return score(args)


def score(args: argparse.Namespace) -> int:
    """Scores what is asked.

    Raises:
      UserError: what the user can mend. DoesNotFit: the weights leave no room.
    """
    from bytescope.train.generate.model_source import open_source
    from bytescope.train.generate.open_engine import open_scorer

    source = open_source(args.source, args.step)
    if args.length is not None and args.length > source.length:
        raise UserError(f"--length={args.length}: the model takes {source.length} positions; give at most that")
    texts = _texts(args, source)
    length = args.length or source.length
    windows = [
        (number, text[start : start + length])
        for number, text in enumerate(texts)
        for start in range(0, len(text), length)
        if len(text) - start > 1
    ]
    if not windows:
        raise UserError("nothing to score: give a text of two tokens or more")
    scorer, params = open_scorer(args, source, max(len(window) for _, window in windows))
    parts: dict[int, dict[int, ScoredText]] = {}
    for found in scorer.score(params, [window for _, window in windows]):
        parts.setdefault(windows[found.number][0], {})[found.number] = found
    scored = {number: [own[place] for place in sorted(own)] for number, own in sorted(parts.items())}
    if args.text is not None:
        _show_tokens(source, scored[0])
    _show(scored)
    if args.out:
        write(args.out, _rows(scored))
    return 0


def _texts(args: argparse.Namespace, source: Source) -> list[tuple[int, ...]]:
    """The tokens of each text."""
    from bytescope.train.generate.text import Prompts, read_texts

    with Prompts(source, chat=False) as prompts:
        if args.text is not None:
            return [prompts.of_row({"text": args.text}, "--text")]
        return read_texts(prompts, args.texts, "--texts")


def mean_of(found: Sequence[ScoredText]) -> tuple[int, float]:
    """(tokens scored, mean of -log p in nats) over the windows of one text or of all."""
    count = sum(len(one.logprobs) for one in found)
    return count, -sum(float(one.logprobs.sum(dtype="float64")) for one in found) / count


def _show(scored: dict[int, list[ScoredText]]) -> None:
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_table import FigureTable, figure

    table = FigureTable(figure("text"), figure("tokens"), figure("nats a token"), figure("perplexity"))
    every = [one for found in scored.values() for one in found]
    rows = [(str(number), found) for number, found in scored.items()] if len(scored) > 1 else []
    for name, found in [*rows, ("all", every)]:
        count, nats = mean_of(found)
        table.add(name, f"{count:,}", f"{nats:.4f}", f"{math.exp(min(nats, 700)):,.4f}")
    put(table)


def _show_tokens(source: Source, found: Sequence[ScoredText]) -> None:
    from bytescope.memory.view.console import one_line, put
    from bytescope.memory.view.text_table import FigureTable, figure, label

    table = FigureTable(figure("token"), label("text"), figure("log p"))
    for one in found:
        for token, logprob in zip(one.tokens[1:], one.logprobs):
            shown = repr(source.tokenizer.decode([token])) if source.tokenizer else ""
            table.add(str(token), one_line(shown), f"{logprob:.4f}")
    put(table)
    print()


def _rows(scored: dict[int, list[ScoredText]]) -> str:
    """Returns one line of JSON per text."""
    lines = []
    for number, found in scored.items():
        row = {
            "row": number,
            "tokens": [token for one in found for token in one.tokens],
            "logprobs": [round(float(value), 6) for one in found for value in one.logprobs],
            "perplexity": math.exp(min(mean_of(found)[1], 700)),
        }
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)
