"""Reads prompts and texts from files, and turns them into tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.errors import check_readable
from bytescope.train.data.chat_template import Renderer, find_template
from bytescope.train.data.records import Chat, Malformed
from bytescope.train.data.tokenizer import Tokenizer
from bytescope.train.generate.model_source import Source
from bytescope.train.user_errors import UserError


@contextlib.contextmanager
def readable(path: Path, flag: str, expected: str) -> Iterator[None]:
    """A context manager for reading a text file. If the file cannot be read, it raises a UserError that names the
    command-line flag `flag` and the kind of file that is `expected`."""
    try:
        check_readable(path, pipes=True)
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{flag}={path} cannot be read ({reason}): give {expected}") from None


def read_rows(path: Path, flag: str = "--prompts") -> list[dict[str, Any]]:
    """Returns the objects in a file of JSON lines. Error messages name the command-line flag `flag`.

    Raises:
      UserError: the file is empty, it cannot be read, or a line is not a JSON object.
    """
    rows = []
    with readable(path, flag, "a file of JSON lines"), path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise UserError(f'{path} line {number} is not a JSON object: write rows such as {{"text": "Once"}}')
            rows.append(row)
    if not rows:
        raise UserError(f'{flag}={path} is empty: give rows such as {{"text": "Once"}}')
    return rows


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
    with readable(path, flag, "a file of text, or rows in a .jsonl file"):
        return [prompts.of_row({"text": path.read_text(encoding="utf-8")}, str(path))]
