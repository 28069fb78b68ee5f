"""Text of prompts to tokens, and tokens of answers to text as they come, up to a stop string."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.errors import check_readable
from bytescope.memory.view.console import safe
from bytescope.train.data.chat_template import Renderer, find_template
from bytescope.train.data.example_content import Chat, Malformed
from bytescope.train.data.tokenizer import Tokenizer
from bytescope.train.generate.answers import read_rows
from bytescope.train.generate.engine import Engine
from bytescope.train.generate.model_source import Source
from bytescope.train.generate.request import Running
from bytescope.train.user_errors import UserError

UNFINISHED = "\ufffd"  # what a decoder makes of bytes whose rest is still to come


@dataclasses.dataclass
class Growing:
    """The text of an answer while tokens are added.

    Fields:
      stops: strings, the first of which ends the text and is left out. text: so far, without what may yet become part
      of a stop string. stopped: whether one came.
    """

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    text: str = ""
    stopped: bool = False
    _tokens: list[int] = dataclasses.field(default_factory=list)
    _held: str = ""

    def add(self, token: int) -> str:
        """Adds a token; returns the new text."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        whole = self.tokenizer.decode(self._tokens)
        if whole.endswith(UNFINISHED):
            return ""
        return self._show(whole, final=False)

    def finish(self) -> str:
        """Returns the rest of the text, when no token follows."""
        return "" if self.stopped else self._show(self.tokenizer.decode(self._tokens), final=True)

    def follow(self, engine: Engine, one: Running) -> str:
        """Adds the newest token of a request, and ends the request if a stop string is complete; returns the new
        text."""
        new = "" if one.ended == "stop" else self.add(one.tokens[-1])
        if self.stopped:
            engine.finish(one)
        return new + (self.finish() if one.ended else "")

    def _show(self, whole: str, final: bool) -> str:
        stops = [whole.find(stop) for stop in self.stops if stop in whole]
        end = len(whole)
        if stops:
            self.stopped, end = True, min(stops)
        elif not final:  # what may become a stop string is held back
            end -= max((_begun(whole, stop) for stop in self.stops), default=0)
        new, self.text = whole[len(self.text) : end], whole[: max(end, len(self.text))]
        return new


def _begun(text: str, stop: str) -> int:
    """Returns the number of characters at the end of a text that may be the beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class Prompts:
    """Makes tokens of prompts. A context: the process that renders chat templates ends with it.

    Args:
      chat: whether a text is a user's message, to be put into the chat template.
    """

    def __init__(self, source: Source, chat: bool):
        self.source, self.chat = source, chat
        self._renderer: Renderer | None = None

    def __enter__(self) -> Prompts:
        return self

    def __exit__(self, *error: object) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def of_row(self, row: Mapping[str, Any], where: str) -> tuple[int, ...]:
        """Returns the tokens of a row with `text`, `tokens` or `messages`.

        Raises:
          UserError: it has none of them, or no valid ones; `where` names it.
        """
        if (tokens := row.get("tokens")) is not None:
            vocab = self.source.config.model.vocab_size
            if not isinstance(tokens, list) or not all(type(i) is int and 0 <= i < vocab for i in tokens):
                raise UserError(f"{where}: tokens are to be a list of ids from 0 to {vocab - 1}")
            found = tuple(tokens)
        elif isinstance(row.get("messages"), list):
            found = self.of_messages(row["messages"], where)
        elif isinstance(row.get("text"), str):
            found = self.of_text(row["text"])
        else:
            raise UserError(f"{where}: no text, tokens or messages; give one of them")
        if not found:
            raise UserError(f"{where}: an empty prompt: give at least one token")
        return found

    def of_text(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text, or with `chat` of a conversation with this one message of the user."""
        if self.chat:
            return self.of_messages([{"role": "user", "content": text}], "--chat")
        return (*self.source.begin, *map(int, self._tokenizer().encode(text)))

    def of_messages(self, messages: Sequence[Mapping[str, Any]], where: str) -> tuple[int, ...]:
        """Returns the tokens of a conversation up to the beginning of the next answer."""
        if not all(
            isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in messages
        ):
            raise UserError(f"{where}: each message is to have a role and a content, both texts")
        tokenizer = self._tokenizer()
        if self._renderer is None:
            self._renderer = Renderer(find_template(tokenizer, self.source.config.data.chat_template))
        # What comes before an answer is what the model reads.
        chat = Chat([*map(dict, messages), {"role": "assistant", "content": ""}], None)
        (rendered,) = self._renderer.render([chat], before=True, up_to=False)
        if isinstance(rendered, Malformed):
            raise UserError(f"{where}: {rendered}")
        return tuple(map(int, tokenizer.encode(rendered.before[-1])))

    def _tokenizer(self) -> Tokenizer:
        if self.source.tokenizer is None:
            raise UserError(
                f"{self.source.title} has no tokenizer: give token ids, in rows such as "
                '{"tokens": [1, 2]} of a .jsonl file'
            )
        return self.source.tokenizer


def read_texts(prompts: Prompts, path: Path, flag: str) -> list[tuple[int, ...]]:
    """Returns the tokens of each row of a .jsonl file, or of any other file as one text.

    Raises:
      UserError: it cannot be read, or a row has no text; `flag` names it.
    """
    if path.suffix == ".jsonl":
        return [prompts.of_row(row, f"{path} row {number}") for number, row in enumerate(read_rows(path, flag))]
    try:
        check_readable(path, pipes=True)
        return [prompts.of_row({"text": path.read_text(encoding="utf-8")}, str(path))]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(
            f"{flag}={path} cannot be read ({reason}): give a file of text, or rows in a .jsonl file"
        ) from None


def stream(engine: Engine, one: Running, source: Source, stops: Sequence[str]) -> str:
    """Prints the answer of the only request under way as it is made; returns its text."""
    shown = safe if sys.stdout.isatty() else str
    growing = Growing(source.tokenizer, tuple(stops)) if source.tokenizer else None
    while not one.ended:
        for _ in engine.step():
            new = growing.follow(engine, one) if growing else f"{one.tokens[-1]} "
            print(shown(new), end="", flush=True)
    return growing.text if growing else ""
