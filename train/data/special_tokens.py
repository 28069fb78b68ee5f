"""Special tokens that are written in messages stay text: a message that says <|im_end|> ends nothing."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from bytescope.train.data.example_content import Chat
from bytescope.train.data.tokenizer import JsonTokenizer

# Around the number of a special token in a message, while the template is rendered: Unicode keeps these out of text.
IN_MESSAGE = ("\ufdd2", "\ufdd3")


class Guard:
    """Encodes text of a template with messages in it, in which `protect` has replaced the special tokens."""

    def __init__(self, tokenizer: JsonTokenizer):
        self._names = sorted(tokenizer.special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._either = re.compile(f"{IN_MESSAGE[0]}([0-9]+){IN_MESSAGE[1]}|({self._pattern.pattern})")
        self._of = tokenizer
        self._renamed: tuple[JsonTokenizer, dict[str, str]] | None = None

    def protect(self, chat: Chat) -> Chat:
        """The conversation without special tokens in its messages; the same object if it has none."""
        found = dataclasses.replace(chat, messages=self._replaced(chat.messages), tools=self._replaced(chat.tools))
        return chat if found == chat else found

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda m: f"{IN_MESSAGE[0]}{self._names.index(m[0])}{IN_MESSAGE[1]}", value)
        if isinstance(value, list):
            return [self._replaced(one) for one in value]
        if isinstance(value, dict):
            return {key: self._replaced(one) for key, one in value.items()}
        return value

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ids of each text and their characters in it, as JsonTokenizer's; what was replaced is text again."""
        tokenizer, names = self._renamed = self._renamed or self._of.renamed()
        found = []
        for text in texts:
            written, begins, ends = [], [], []  # the characters that are encoded, and where in `text` each comes from
            at = 0
            for match in self._either.finditer(text):
                part = text[at : match.start()]
                into = self._names[int(match[1])] if match[1] else names[match[2]]
                written += [part, into]
                begins += [*range(at, match.start()), *[match.start()] * len(into)]
                ends += [*range(at + 1, match.start() + 1), *[match.end()] * len(into)]
                at = match.end()
            written.append(text[at:])
            begins += range(at, len(text))
            ends += range(at + 1, len(text) + 1)
            ((ids, spans),) = tokenizer.encode_spans(["".join(written)])
            places = [
                (begins[a], ends[b - 1]) if a < b else (begins[a] if a < len(begins) else len(text),) * 2
                for a, b in spans.tolist()
            ]
            found.append((ids, np.array(places, np.int64).reshape(-1, 2)))
        return found
