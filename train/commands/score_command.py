"""`bytescope generate --score`: computes log-probabilities and perplexity of texts under a model."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bytescope.memory.commands.arguments import Parser, add_json, check_files, user_path
from bytescope.memory.commands.json_output import write_json
from bytescope.train.generate import generate_flags
from bytescope.train.user_errors import UserError

if TYPE_CHECKING:
    from bytescope.train.generate.score import ScoredText

EPILOG = """\
examples:
  bytescope generate smollm/ --score=held_out.txt
  bytescope generate smollm/ --score=rows.jsonl --json=scores.json

Each row of a .jsonl file has text, tokens or messages; any other file is one
text. A text longer than --length is split into windows, which are scored
independently. Perplexity is exp(mean of -log p) over all tokens except the
first token of each window.
exit codes: 0 done, 2 a mistake, 3 does not fit, 130 stopped by Ctrl-C"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `bytescope generate --score`."""
    parser = Parser(
        prog="bytescope generate --score",
        allow_abbrev=False,
        epilog=EPILOG,
        usage="bytescope generate RUN_OR_FOLDER --score=FILE [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compute the log-probabilities and the perplexity of texts.",
    )
    parser.remedies = {"--out": "give --json=FILE, which has a row for each text"}
    generate_flags.add_model(parser)
    parser.add_argument(
        "--score",
        type=user_path,
        metavar="FILE",
        required=True,
        help="file to score: each row of a .jsonl file is a text, any other file is one text",
    )
    add_json(parser, "tokens, logprobs and perplexity of each text")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line of `bytescope generate --score`.

    Raises:
      ValueError: the command line is not valid; the error has the exit code as `exit_code`.
    """
    args = make_parser().parse_args(argv)
    generate_flags.check_ranges(args)
    check_files(args)
    return args


def run(args: argparse.Namespace) -> int:
    """Starts the devices and scores the texts; returns the exit code."""
    generate_flags.start_devices(args)
    return score(args)


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The log-probabilities of a text.

    Fields:
        row: number of the text in its file, from 0.
        tokens: the tokens of the text.
        logprobs: the natural logarithm of the probability of each token but the first of a window.
        perplexity: perplexity of these tokens.
    """

    row: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    perplexity: float


@dataclasses.dataclass(frozen=True)
class ScoreResult:
    """The result of bytescope generate --score.

    Fields:
        texts: the scored texts.
    """

    texts: Sequence[TextScore]


def score(args: argparse.Namespace) -> int:
    """Computes the log-probability of each token of the texts, prints the table and writes the file of --json; returns
    the exit code.

    Raises:
      UserError: an argument or an input file is wrong.
      DoesNotFit: the weights leave no memory for a step.
    """
    from bytescope.train.generate.model_source import open_source
    from bytescope.train.generate.open_engine import open_scorer
    from bytescope.train.generate.text import Prompts, read_texts

    source = open_source(args.source, args.step)
    if args.length is not None and args.length > source.length:
        raise UserError(
            f"--length={args.length} is more than the model's {source.length} positions: give at most {source.length}"
        )
    texts = read_texts(Prompts(source, chat=False), args.score, "--score")
    length = args.length or source.length
    windows = [
        (number, text[start : start + length])
        for number, text in enumerate(texts)
        for start in range(0, len(text), length)
        if len(text) - start > 1
    ]
    if not windows:
        raise UserError("the texts have fewer than two tokens, so no token can be scored: give longer texts")
    scorer, params = open_scorer(args, source, max(len(window) for _, window in windows))
    parts: dict[int, dict[int, ScoredText]] = {}
    for scored_window in scorer.score(params, [window for _, window in windows]):
        parts.setdefault(windows[scored_window.number][0], {})[scored_window.number] = scored_window
    scored = {number: [own[place] for place in sorted(own)] for number, own in sorted(parts.items())}
    _show(scored)
    write_json(args, ScoreResult(_rows(scored)), caveats=("The values were computed on the devices of this machine.",))
    return 0


def mean_of(windows: Sequence[ScoredText]) -> tuple[int, float]:
    """Returns the number of scored tokens of the windows, and the mean negative log-probability per token in nats."""
    count = sum(len(one.logprobs) for one in windows)
    return count, -sum(float(one.logprobs.sum(dtype="float64")) for one in windows) / count


def _show(scored: dict[int, list[ScoredText]]) -> None:
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_table import FigureTable, figure

    table = FigureTable(figure("text"), figure("tokens"), figure("nats a token"), figure("perplexity"))
    every = [one for windows in scored.values() for one in windows]
    rows = [(str(number), windows) for number, windows in scored.items()] if len(scored) > 1 else []
    for name, windows in [*rows, ("all", every)]:
        count, nats = mean_of(windows)
        table.add(name, f"{count:,}", f"{nats:.4f}", f"{math.exp(min(nats, 700)):,.4f}")
    put(table)


def _rows(scored: dict[int, list[ScoredText]]) -> list[TextScore]:
    return [
        TextScore(
            row=number,
            tokens=[token for one in windows for token in one.tokens],
            logprobs=[round(float(value), 6) for one in windows for value in one.logprobs],
            perplexity=math.exp(min(mean_of(windows)[1], 700)),
        )
        for number, windows in scored.items()
    ]
