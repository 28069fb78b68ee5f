"""How a tensor of a checkpoint lies in our layout, as one line: `(h k) d -> d h k`.

Left of the arrow are the axes on disk, right of it ours; a group in parentheses is one axis on disk and several of
ours. Letters: d d_model, h n_heads, g n_kv_heads, k d_head, f d_ff, v vocabulary, p positions, e experts, m the width
of an expert. Nothing is computed: a slice of ours is a slice of theirs, seen in another order, so it can be read
without the rest, and written back.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # it brings jax along, which a config does not need
    from bytescope.model import ModelConfig

Sizes = Mapping[str, int]
Span = tuple[int, int]  # from the first to before the second


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Letter -> size of that axis, as checkpoints have it: the vocabulary without padding."""
    return {"d": model.d_model, "h": model.n_heads, "g": model.n_kv_heads, "k": model.d_head, "f": model.d_ff,
            "v": model.vocab_size, "p": model.max_seq_len, "e": model.experts, "m": model.expert_width}


def spans_of(index: Sequence[slice], shape: Sequence[int]) -> list[Span]:
    """The spans of a basic index without steps. Raises ValueError for another one."""
    spans = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    if any(step != 1 for _, _, step in spans):
        raise ValueError(f"index {tuple(index)} has steps: give spans")
    return [(start, max(start, stop)) for start, stop, _ in spans]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """`theirs`: for each axis on disk its letters; `ours`: a letter for each axis."""

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]

    @classmethod
    @cache
    def of(cls, text: str) -> Pattern:
        """From its line. Raises ValueError unless both sides have the same letters, each once."""
        left, _, right = text.partition("->")
        theirs = tuple(tuple(re.findall(r"\w", group)) for group in re.findall(r"\([^)]*\)|\w", left))
        ours = tuple(re.findall(r"\w", right))
        if sorted(sum(theirs, ())) != sorted(set(ours)) or len(set(ours)) != len(ours):
            raise ValueError(f"pattern {text!r}: give the same letters on both sides, each once")
        return cls(theirs, ours)

    def their_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape on disk."""
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.theirs)

    def our_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape in our layout."""
        return tuple(sizes[letter] for letter in self.ours)

    def their_spans(self, spans: Sequence[Span], sizes: Sizes) -> list[Span]:
        """Spans on disk that hold those of ours; of a group the first letter alone narrows what is read."""
        of = dict(zip(self.ours, spans, strict=True))
        found = []
        for first, *rest in self.theirs:
            inner = math.prod(sizes[letter] for letter in rest)
            found.append((of[first][0] * inner, of[first][1] * inner))
        return found

    def forward(self, theirs: np.ndarray, spans: Sequence[Span], sizes: Sizes) -> np.ndarray:
        """What `their_spans` gave, as a view in our layout of these spans."""
        of = dict(zip(self.ours, spans, strict=True))
        split, order = [], []
        for first, *rest in self.theirs:
            split += [of[first][1] - of[first][0], *(sizes[letter] for letter in rest)]
            order += [first, *rest]
        array = theirs.reshape(split).transpose([order.index(letter) for letter in self.ours])
        leading = {group[0] for group in self.theirs}
        return array[tuple(slice(None) if letter in leading else slice(*of[letter]) for letter in self.ours)]

    def back(self, ours: np.ndarray) -> np.ndarray:
        """A whole tensor of ours as it lies on disk: the inverse of `forward`."""
        order = [letter for group in self.theirs for letter in group]
        array = ours.transpose([self.ours.index(letter) for letter in order])
        sizes = dict(zip(self.ours, ours.shape, strict=True))
        return array.reshape(self.their_shape(sizes))
