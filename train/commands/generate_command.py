"""`bytescope generate`: generates text from a run or a folder of weights, and shows the memory before it starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import Parser, check_files, user_path
from bytescope.memory.errors import disk_remedy
from bytescope.memory.host.process_memory import host_phase
from bytescope.memory.units import plural
from bytescope.train.generate import generate_flags
from bytescope.train.generate.generate_flags import MAX_TOKENS
from bytescope.train.user_errors import UserError

if TYPE_CHECKING:  # these modules import jax, which the parser does not need
    from bytescope.train.generate.model_source import Source
    from bytescope.train.generate.request import Request

EPILOG = """\
examples:
  bytescope generate runs/mine --prompt="Once upon a time" --temperature=0.8
  bytescope generate smollm/ --chat --prompt="What is a page?"
  bytescope generate smollm/ --prompts=questions.jsonl --out=answers.jsonl

Each row of --prompts has text, tokens or messages, and optionally a seed; each
row of --out has prompt, tokens and text. Run the same command again to continue
an interrupted one. bytescope report --generate shows the memory for any device.
To serve a model, export it to vLLM.
exit codes: 0 done, 2 a mistake, 3 does not fit, 130 stopped by Ctrl-C"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `bytescope generate`."""
    parser = Parser(
        prog="bytescope generate",
        allow_abbrev=False,
        epilog=EPILOG,
        usage="%(prog)s RUN_OR_FOLDER (--prompt=TEXT | --prompts=FILE) [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Generate text from a run or a folder of weights.",
    )
    generate_flags.add_model(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompts.add_argument(
        "--prompts",
        type=user_path,
        metavar="FILE",
        help="file of prompts: JSON lines, each with text, tokens or messages",
    )
    parser.add_argument(
        "--out",
        type=user_path,
        metavar="FILE",
        help="with --prompts: write a JSON line for each finished answer to FILE; rows that FILE answers are skipped",
    )
    parser.add_argument(
        "--chat", action="store_true", help="treat each prompt as a user's message and apply the chat template"
    )
    generate_flags.add_sampling(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line of `bytescope generate`.

    Raises:
      ValueError: the command line is not valid; the error has the exit code as `exit_code`.
    """
    args = make_parser().parse_args(argv)
    generate_flags.check_ranges(args)
    check_files(args, ("out",))
    if args.out is not None and args.prompts is None:
        raise UserError(f"--out={args.out} is only valid with --prompts=FILE: give both")
    return args


def run(args: argparse.Namespace) -> int:
    """Starts the devices and generates text; returns the exit code."""
    generate_flags.start_devices(args)
    with host_phase("sample"):
        generate(args)
    return 0


def generate(args: argparse.Namespace) -> None:
    """Answers the prompt, or the prompts in a file. Each answer is printed, or written to `args.out`, when it is
    finished.

    Raises:
      UserError: an argument or an input file is wrong.
      DoesNotFit: the weights leave no memory for the KV cache.
    """
    from bytescope.memory.view.console import safe
    from bytescope.memory.view.progress_bar import progress
    from bytescope.train.generate.model_source import open_source
    from bytescope.train.generate.open_engine import open_engine
    from bytescope.train.generate.text import Prompts, read_rows

    source = open_source(args.source, args.step)
    prompts = Prompts(source, args.chat)
    rows = [{"text": args.prompt}] if args.prompts is None else read_rows(args.prompts)
    finished = _finished_rows(args.out, rows) if args.out and args.out.is_file() else set()
    numbers = [number for number in range(len(rows)) if number not in finished]
    requests = []
    for number in numbers:
        row = rows[number]
        where = "--prompt" if args.prompts is None else f"{args.prompts} row {number}"
        seed = row.get("seed", (args.seed + number) % 2**32)
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise UserError(f"{where}: seed={seed!r} is out of range: give a whole number from 0 to 2**32 - 1")
        requests.append(_make_request(args, prompts.of_row(row, where), where, source, seed))
    if not requests:
        print(f"{args.out}: {plural(len(rows), 'row')} answered already")
        return
    needed = max(len(request.tokens) + request.most for request in requests)
    engine = open_engine(args, source, needed, len(requests), args.temperature > 0)
    printable = safe if sys.stdout.isatty() else str
    with _opened(args.out) as out, progress(len(requests), "answering") as bar:
        for one in engine.answers(requests):
            number = numbers[one.number]
            text = source.tokenizer.decode(one.answer) if source.tokenizer else None
            if out:
                answer = {"row": number, "prompt": _prompt_of(rows[number]), "tokens": list(one.answer), "text": text}
                print(json.dumps(answer | {"ended": one.ended}), file=out, flush=True)
            else:
                label = f"[{number}] " if args.prompts else ""
                with bar.aside():
                    print(label + printable(" ".join(map(str, one.answer)) if text is None else text), flush=True)
            bar.advance(1)
    if out:
        print(f"{args.out}: {plural(len(rows), 'row')} answered")


def _prompt_of(row: Mapping[str, Any]) -> Any:
    return next(row[name] for name in ("text", "messages", "tokens") if name in row)


def _finished_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Returns the numbers of the rows that a file answers, and cuts off a last line that was not written completely.

    Raises UserError if the file does not have answers to these rows.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    try:
        answers = [json.loads(line) for line in whole]
        answered = {answer["row"] for answer in answers if answer["prompt"] == _prompt_of(rows[answer["row"]])}
    except (ValueError, KeyError, TypeError, IndexError):
        answered = set()
    if len(answered) < len(whole):
        raise UserError(f"--out={path} has other lines than answers to these prompts: give another file")
    if len(whole) < len(lines):
        os.truncate(path, sum(map(len, whole)))
    return answered


def _make_request(args: argparse.Namespace, tokens: tuple[int, ...], where: str, source: Source, seed: int) -> Request:
    from bytescope.train.generate.request import Request

    most = args.max_tokens or max(min(MAX_TOKENS, min(args.length or source.length, source.length) - len(tokens)), 1)
    if len(tokens) + most > source.length:
        raise UserError(
            f"{where}: its {len(tokens)} tokens and {most} new tokens are more than the model's {source.length} "
            "positions: shorten the prompt, or give a smaller --max-tokens"
        )
    return Request(tokens, most, source.ends, args.temperature, args.top_k, args.top_p, seed)


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[IO[str] | None]:
    """Opens the file of answers; None if they are printed. Errors of the disk are explained in one line."""
    if path is None:
        yield None
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            yield file
    except OSError as error:
        remedy = disk_remedy(error)
        raise UserError(f"--out={path} cannot be written ({error.strerror}): {remedy}give another file") from None
