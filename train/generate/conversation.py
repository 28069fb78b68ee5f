"""Generation as somebody types: each line is a prompt, or with --chat the next message of a conversation."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bytescope.train.generate.model_source import Source
from bytescope.train.generate.open_engine import open_engine
from bytescope.train.generate.request import request
from bytescope.train.generate.text import Prompts, stream
from bytescope.train.launch.signals import INTERRUPTED
from bytescope.train.user_errors import UserError


def converse(args: argparse.Namespace, source: Source, prompts: Prompts) -> int:
    """Reads lines until there are no more; what a conversation has said already is not computed again."""
    if source.tokenizer is None:
        raise UserError(f"{source.title} has no tokenizer: give prompts as tokens, in rows of --prompts=FILE")
    engine = open_engine(args, source, source.length, 1, args.temperature > 0)
    print("an empty line or Ctrl-D ends it; Ctrl-C ends an answer", file=sys.stderr)
    said: list[dict[str, Any]] = []
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
        said.append({"role": "user", "content": line})
        try:
            tokens = prompts.of_messages(said, "--chat") if args.chat else prompts.of_text(line)
            one = engine.submit(request(args, tokens, source))
        except UserError as error:  # too long: the next may be shorter
            print(f"error: {error}", file=sys.stderr)
            said.pop()
            continue
        try:
            text = stream(engine, one, source, args.stop)
        except KeyboardInterrupt:
            engine.finish(one)
            text = source.tokenizer.decode(one.answer)
        said.append({"role": "assistant", "content": text})
        print()
