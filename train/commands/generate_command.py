"""`bytescope generate`: generates text from a run or a folder of weights, and shows the memory before it starts."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import INTERRUPTED, Parser, user_path
from bytescope.memory.host.process_memory import host_phase
from bytescope.memory.units import plural
from bytescope.train.generate import generate_flags
from bytescope.train.user_errors import UserError

if TYPE_CHECKING:  # these modules import jax, which the parser does not need
    from bytescope.train.generate.answers import Answers, PromptRow
    from bytescope.train.generate.engine import Engine
    from bytescope.train.generate.model_source import Source
    from bytescope.train.generate.text import Prompts

EPILOG = """\
examples:
  bytescope generate runs/mine --prompt="Once upon a time" --temperature=0.8
  bytescope generate smollm/ --chat                  a conversation
  bytescope generate smollm/ --prompts=questions.jsonl --out=answers.jsonl

Each row of --prompts has text, tokens or messages, and optionally a seed; each
row of --out has prompt, tokens and text. Run the same command again to resume
an interrupted one. bytescope report --generate shows the memory for any device.
To serve a model, export it to vLLM.
exit codes: 0 done, 2 a mistake, 3 does not fit, 130 stopped by Ctrl-C"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `bytescope generate`."""
    parser = Parser(
        prog="bytescope generate",
        allow_abbrev=False,
        epilog=EPILOG,
        usage="%(prog)s RUN_OR_FOLDER [--prompt=TEXT | --prompts=FILE] [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Generate text from a run or a folder of weights.\n"
        "Without a prompt, answer the lines that you type.",
    )
    generate_flags.add_model(parser)
    parser.add_argument(
        "--prompt", metavar="TEXT", help="text to continue; the answer is printed while it is generated"
    )
    parser.add_argument(
        "--prompts",
        type=user_path,
        metavar="FILE",
        help="file of prompts: JSON lines, each with text, tokens or messages",
    )
    parser.add_argument(
        "--out",
        type=user_path,
        metavar="FILE",
        help="with --prompts: file to append each finished answer to; rows that it already answers are skipped",
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
    generate_flags.check(args)
    if args.prompt is not None and args.prompts is not None:
        raise UserError("--prompt and --prompts cannot be combined: give one of the two")
    if args.out is not None and args.prompts is None:
        raise UserError(f"--out={args.out} is only valid with --prompts=FILE: give both")
    return args


def run(args: argparse.Namespace) -> int:
    """Starts the devices and generates text; returns the exit code."""
    generate_flags.start_devices(args)
    return generate(args)


def generate(args: argparse.Namespace) -> int:
    """Answers the prompt, the prompts in a file, or the lines that the user types; returns the exit code.

    Raises:
      UserError: an argument or an input file is wrong.
      DoesNotFit: the weights leave no memory for the KV cache.
    """
    from bytescope.train.generate.model_source import open_source
    from bytescope.train.generate.text import Prompts

    source = open_source(args.source, args.step)
    prompts = Prompts(source, args.chat)
    with host_phase("sample"):
        if args.prompts is not None:
            return _answer_file(args, source, prompts)
        if args.prompt is not None or not sys.stdin.isatty():
            text = sys.stdin.read() if args.prompt is None else args.prompt
            if args.prompt is None and not text.strip():
                raise UserError("standard input has no prompt: give --prompt=TEXT or --prompts=FILE")
            return _answer_prompt(args, source, prompts.of_row({"text": text}, "--prompt"))
        return _converse(args, source, prompts)


def _answer_prompt(args: argparse.Namespace, source: Source, tokens: tuple[int, ...]) -> int:
    from bytescope.train.generate.open_engine import open_engine
    from bytescope.train.generate.request import make_request
    from bytescope.train.generate.text import stream

    request = make_request(args, tokens, source)
    engine = open_engine(args, source, len(tokens) + request.most, 1, args.temperature > 0)
    began = time.perf_counter()
    one = engine.submit(request)
    try:
        stream(engine, one, source, args.stop)
    except KeyboardInterrupt:
        print()
        return INTERRUPTED
    print()
    _show_speed(len(one.tokens) - len(tokens), time.perf_counter() - began)
    return 0


def _converse(args: argparse.Namespace, source: Source, prompts: Prompts) -> int:
    """Answers each line that a user types, and returns the exit code. With --chat, each line is the next message of one
    conversation.
    """
    from bytescope.train.generate.open_engine import open_engine
    from bytescope.train.generate.request import make_request
    from bytescope.train.generate.text import stream

    if source.tokenizer is None:
        raise UserError(f"{source.title} has no tokenizer: give prompts as tokens, in rows of --prompts=FILE")
    engine = open_engine(args, source, source.length, 1, args.temperature > 0)
    print("an empty line or Ctrl-D ends the conversation; Ctrl-C ends an answer", file=sys.stderr)
    messages: list[dict[str, Any]] = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            return INTERRUPTED
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        try:
            tokens = prompts.of_messages(messages, "--chat") if args.chat else prompts.of_text(line)
            one = engine.submit(make_request(args, tokens, source))
        except UserError as error:  # the prompt is too long; the next prompt may be shorter
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            continue
        try:
            text = stream(engine, one, source, args.stop)
        except KeyboardInterrupt:
            engine.finish(one)
            text = source.tokenizer.decode(one.answer)
        messages.append({"role": "assistant", "content": text})
        print()


def _answer_file(args: argparse.Namespace, source: Source, prompts: Prompts) -> int:
    """Generates an answer to each prompt in the file `args.prompts`, and prints it or appends it to the file
    `args.out`. Returns the exit code.
    """
    from contextlib import ExitStack

    from bytescope.train.generate.answers import Answers, PromptRow, read_rows
    from bytescope.train.generate.open_engine import open_engine
    from bytescope.train.generate.request import make_request

    rows = []
    for number, row in enumerate(read_rows(args.prompts)):
        where = f"{args.prompts} row {number}"
        seed = row.get("seed", (args.seed + number) % 2**32)
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise UserError(f"{where}: seed={seed!r} is out of range: give a whole number from 0 to 2**32 - 1")
        prompt = next((row[name] for name in ("text", "messages", "tokens") if name in row), None)
        request = make_request(args, prompts.of_row(row, where), source, seed)
        rows.append(PromptRow(number, prompt, request, tuple(args.stop)))
    with ExitStack() as stack:
        out = stack.enter_context(Answers(args.out, rows)) if args.out else None
        left = [row for row in rows if out is None or row.number not in out.done]
        if not left:
            print(f"{args.out}: all {plural(len(rows), 'row')} answered")
            return 0
        longest = max(left, key=lambda row: len(row.request.tokens) + row.request.most)
        needed = len(longest.request.tokens) + longest.request.most
        if needed > source.length:
            raise UserError(
                f"{args.prompts} row {longest.number}: its {len(longest.request.tokens)} tokens and "
                f"--max-tokens={longest.request.most} are more than the model's {source.length} positions: "
                "shorten the prompt, or give a smaller --max-tokens"
            )
        engine = open_engine(args, source, needed, len(left), args.temperature > 0)
        return _answer_rows(engine, source, left, len(rows), out)


def _answer_rows(engine: Engine, source: Source, left: Sequence[PromptRow], total: int, out: Answers | None) -> int:
    """Generates an answer to each prompt in `left`, and writes it as soon as it is complete. Ctrl-C stops the
    generation; complete answers are kept. Returns the exit code.

    Args:
      engine: generates the tokens of all prompts at the same time.
      source: the weights and their tokenizer.
      left: the prompts that have no answer yet.
      total: number of prompts, including those answered earlier, for the status line.
      out: the file to append answers to; None to print them.
    """
    from bytescope.train.generate.text import Growing

    running = {engine.submit(row.request).number: row for row in left}
    texts = {number: Growing(source.tokenizer, row.stops) for number, row in running.items() if source.tokenizer}
    began, generated = time.perf_counter(), 0
    try:
        with _status_line(total) as note:
            while engine.busy:
                for one in engine.step():
                    generated += 1
                    growing = texts.get(one.number)
                    if growing:
                        growing.follow(engine, one)
                    if one.ended:
                        _write_answer(running[one.number], one, growing.text if growing else None, out)
                        del running[one.number]
                note(total - len(running), generated / (time.perf_counter() - began))
    except KeyboardInterrupt:
        kept = f" in {out.path}: run the same command again to answer the rest" if out else ""
        print(f"interrupted: {total - len(running)} of {plural(total, 'row')} answered{kept}", file=sys.stderr)
        return INTERRUPTED
    if out:
        print(f"{out.path}: {plural(total, 'row')} answered")
    _show_speed(generated, time.perf_counter() - began)
    return 0


def _write_answer(row: PromptRow, one, text: str | None, out: Answers | None) -> None:
    from bytescope.memory.view.console import safe

    if out:
        out.add(row, one, text)
        return
    clean = safe if sys.stdout.isatty() else str
    prompt = row.prompt if isinstance(row.prompt, str) else " ".join(map(str, row.prompt))
    print(
        f"[{row.number}] {clean(prompt)}\n{clean(text) if text is not None else ' '.join(map(str, one.answer))}\n",
        flush=True,
    )


@contextlib.contextmanager
def _status_line(total: int) -> Iterator[Callable[[int, float], None]]:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, rate: None
        return
    with console.status(f"0 of {total} answered") as status:
        yield lambda done, rate: status.update(f"{done} of {total} answered, {rate:,.0f} tokens/s")


def _show_speed(count: int, seconds: float) -> None:
    if sys.stderr.isatty():
        print(f"{count:,} tokens in {seconds:.1f} s, {count / max(seconds, 1e-9):,.1f} a second", file=sys.stderr)
