"""Turns prompts into tokens, and the tokens of answers into text as they are generated, up to a stop string."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.view.console import safe
from bytescope.train.data.chat_template import Renderer, find_template
from bytescope.train.data.records import Chat, Malformed
from bytescope.train.data.tokenizer import Tokenizer
from bytescope.train.generate.answers import read_rows, readable
from bytescope.train.generate.engine import Engine
from bytescope.train.generate.model_source import Source
from bytescope.train.generate.request import Running
from bytescope.train.user_errors import UserError

TEXTS = "a file of text, or rows in a .jsonl file"
UNFINISHED = "\ufffd"  # decoded from an incomplete UTF-8 character


@dataclasses.dataclass
class Growing:
    """The text of one answer, which grows with each generated token.

    Fields:
      tokenizer: decodes the tokens.
      stops: strings that end the text and are not part of it.
      text: the text so far, without an end that may be the beginning of a stop string.
      stopped: True if a stop string was generated.
      _tokens: ids of the tokens so far.
    """

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    text: str = ""
    stopped: bool = False
    _tokens: list[int] = dataclasses.field(default_factory=list)

    def add(self, token: int) -> str:
        """Adds a token. Returns the characters by which the text has grown."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        whole = self.tokenizer.decode(self._tokens)
        if whole.endswith(UNFINISHED):
            return ""
        return self._show(whole, final=False)

    def finish(self) -> str:
        """Ends the text after the last token. Returns the characters that were held back because they could begin a
        stop string.
        """
        return "" if self.stopped else self._show(self.tokenizer.decode(self._tokens), final=True)

    def follow(self, engine: Engine, one: Running) -> str:
        """Adds the newest token of the request `one` and returns the new characters. Ends the request if the text
        contains a stop string.
        """
        new = "" if one.ended == "stop" else self.add(one.tokens[-1])
        if self.stopped:
            engine.finish(one)
        return new + (self.finish() if one.ended else "")

    def _show(self, whole: str, final: bool) -> str:
        stops = [whole.find(stop) for stop in self.stops if stop in whole]
        end = len(whole)
        if stops:
            self.stopped, end = True, min(stops)
        elif not final:  # characters that may become a stop string are not shown yet
            for size in range(1, max(map(len, self.stops), default=0)):
                if whole.endswith(tuple(stop[:size] for stop in self.stops if size < len(stop))):
                    end = len(whole) - size
        new, self.text = whole[len(self.text) : end], whole[: max(end, len(self.text))]
        return new


class Prompts:
    """Turns prompts into token ids.

    Args:
      source: the model and its tokenizer.
      chat: True if each text is a user's message, to which the chat template is applied.
    """

    def __init__(self, source: Source, chat: bool):
        self.source, self.chat = source, chat
        self._renderer: Renderer | None = None

    def of_row(self, row: Mapping[str, Any], where: str) -> tuple[int, ...]:
        """Returns the token ids of a row that has `text`, `tokens` or `messages`. `where` names the row in error
        messages.

        Raises:
          UserError: the row has none of these fields, or its value is not valid.
        """
        if (tokens := row.get("tokens")) is not None:
            vocab = self.source.config.model.vocab_size
            if not isinstance(tokens, list) or not all(type(i) is int and 0 <= i < vocab for i in tokens):
                raise UserError(f"{where}: tokens must be a list of ids from 0 to {vocab - 1}")
            prompt = tuple(tokens)
        elif isinstance(row.get("messages"), list):
            prompt = self.of_messages(row["messages"], where)
        elif isinstance(row.get("text"), str):
            prompt = self.of_text(row["text"])
        else:
            raise UserError(f"{where} has no text, tokens or messages: give one of them")
        if not prompt:
            raise UserError(f"{where} has an empty prompt: give at least one token")
        return prompt

    def of_text(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text. If `chat` is set, the text is a user's message, and the chat template is
        applied.
        """
        if self.chat:
            return self.of_messages([{"role": "user", "content": text}], "--chat")
        return (*self.source.begin, *map(int, self._tokenizer().encode(text)))

    def of_messages(self, messages: Sequence[Mapping[str, Any]], where: str) -> tuple[int, ...]:
        """Returns the token ids of a conversation under the chat template, up to where the assistant's next answer
        begins.

        Args:
          messages: the turns of the conversation, each with the strings `role` and `content`.
          where: name of the conversation in error messages.
        """
        if not all(
            isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in messages
        ):
            raise UserError(f"{where}: each message must have a role and a content, both strings")
        tokenizer = self._tokenizer()
        if self._renderer is None:
            self._renderer = Renderer(find_template(tokenizer, self.source.config.data.chat_template))
        # The model reads the rendered text before the empty answer.
        chat = Chat([*map(dict, messages), {"role": "assistant", "content": ""}], None)
        rendered = self._renderer.render(chat, before=True, up_to=False)
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
    """Returns the token ids of the texts in a file. Each row of a .jsonl file is a text; any other file is a single
    text.

    Raises:
      UserError: the file cannot be read, or a row has no text. The error names the command-line flag `flag`.
    """
    if path.suffix == ".jsonl":
        return [prompts.of_row(row, f"{path} row {number}") for number, row in enumerate(read_rows(path, flag))]
    with readable(path, flag, TEXTS):
        return [prompts.of_row({"text": path.read_text(encoding="utf-8")}, str(path))]


def stream(engine: Engine, one: Running, source: Source, stops: Sequence[str]) -> str:
    """Runs the engine until the request `one` is answered, prints the answer while it is generated, and returns its
    text. No other request may be running.

    `source` has the tokenizer. `stops`: strings that end the answer.
    """
    printable = safe if sys.stdout.isatty() else str
    growing = Growing(source.tokenizer, tuple(stops)) if source.tokenizer else None
    while not one.ended:
        for _ in engine.step():
            new = growing.follow(engine, one) if growing else f"{one.tokens[-1]} "
            print(printable(new), end="", flush=True)
    return growing.text if growing else ""
