"""Special tokens that are written in messages stay text: a message that says <|im_end|> ends nothing."""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from bytescope.train.data.examples.content import Chat
from bytescope.train.data.records import Malformed
from bytescope.train.data.tokenizer import JsonTokenizer

# What stands for a special token in a message while the template is rendered, and for one of the template while the
# text is encoded: numbers between characters that Unicode keeps out of text.
IN_MESSAGE, OF_TEMPLATE = ("\ufdd2", "\ufdd3"), ("\ufdd4", "\ufdd5")


class Guard:
    """Encodes text of a template with messages in it, in which `protect` has replaced the special tokens."""

    def __init__(self, tokenizer: JsonTokenizer):
        self._names = sorted(tokenizer.special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._either = re.compile(f"{IN_MESSAGE[0]}([0-9]+){IN_MESSAGE[1]}|({self._pattern.pattern})")
        self._of = tokenizer
        self._renamed: tuple[JsonTokenizer, dict[int, int]] | None = None

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
        tokenizer, numbers = self._renamed = self._renamed or self._rename()
        found = []
        for text in texts:
            written, begins, ends = [], [], []  # the characters that are encoded, and where in `text` each comes from
            at = 0
            for match in self._either.finditer(text):
                part = text[at:match.start()]
                into = self._names[int(match[1])] if match[1] else _name(self._names.index(match[2]))
                written += [part, into]
                begins += [*range(at, match.start()), *[match.start()] * len(into)]
                ends += [*range(at + 1, match.start() + 1), *[match.end()] * len(into)]
                at = match.end()
            written.append(text[at:])
            begins += range(at, len(text))
            ends += range(at + 1, len(text) + 1)
            ((ids, spans),) = tokenizer.encode_spans(["".join(written)])
            ids = np.array([numbers.get(i, i) for i in ids.tolist()], ids.dtype)
            spans = [(begins[a], ends[b - 1]) if a < b else (begins[a] if a < len(begins) else len(text),) * 2
                     for a, b in spans.tolist()]
            found.append((ids, np.array(spans, np.int64).reshape(-1, 2)))
        return found

    def _rename(self) -> tuple[JsonTokenizer, dict[int, int]]:
        """The tokenizer with other names for its special tokens, and the id of each there -> its own.

        Raises Malformed if it gives an id twice: then special tokens in messages cannot be told apart.
        """
        content = json.loads(self._of.content())
        for token in content["added_tokens"]:
            if token["special"]:
                token |= {"content": _name(self._names.index(token["content"])), "normalized": False}
        made = self._of.varied(json.dumps(content))
        numbers = {made.id_of(_name(number)): self._of.special[name] for number, name in enumerate(self._names)}
        ordinary = made.model_ids()
        if None in numbers or len(numbers) < len(self._names) or ordinary & numbers.keys():
            raise Malformed("a special token is written in a message, and this tokenizer cannot encode it as text: "
                            "set data.special_tokens=parse")
        return made, numbers


def _name(number: int) -> str:
    return f"{OF_TEMPLATE[0]}{number}{OF_TEMPLATE[1]}"
