"""Describes the layout of a tensor on disk and in our arrays in one line, such as `(h k) d -> d h k`.

The left side has the axes on disk, the right side our axes. A group in parentheses is one axis on disk and several of
ours. Letters: d d_model, h n_heads, g n_kv_heads, k d_head, f d_ff, v vocabulary, p positions, e experts, m the width
of an expert, t the width of all shared experts. For latent attention: q width of the query latent, c width of the
latent of keys and values, s a head's width in the scores, u width of a head's values, z = c plus the width of the
keys' rotated part, y width of the rotated part (`mla_d_rope`). A pattern only reorders elements, so a slice in our
layout can be read without the rest of the tensor, and written back.

`s~` on the left: the last y elements along s are rotated. On disk a rotation pairs neighbours (x[2i], x[2i + 1]), in
our layout halves (x[i], x[i + y/2]), so these elements are reordered.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # this module imports jax, which reading a config does not need
    from bytescope.model import ModelConfig

Sizes = Mapping[str, int]
Span = tuple[int, int]  # (start, stop)


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Returns the size of each letter that patterns such as `(h k) d -> d h k` use, for a model. As in checkpoints, the
    vocabulary is not padded."""
    return {
        "d": model.d_model,
        "h": model.n_heads,
        "g": model.n_kv_heads,
        "k": model.d_head,
        "f": model.d_ff,
        "v": model.vocab_size,
        "p": model.max_seq_len,
        "e": model.experts,
        "m": model.expert_width,
        "t": model.shared_experts * model.expert_width,
        "q": model.mla_q_rank,
        "c": model.mla_kv_rank,
        "s": model.score_width,
        "u": model.value_width,
        "z": model.mla_kv_rank + model.mla_d_rope,
        "y": model.mla_d_rope,
    }


def spans_of(index: Sequence[slice], shape: Sequence[int]) -> list[Span]:
    """Returns the (start, stop) of an index along each axis.

    Args:
      index: a slice without step for each axis.
      shape: shape of the indexed array.
    """
    spans = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return [(start, max(start, stop)) for start, stop, _ in spans]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The layout of a tensor on disk and in our arrays, parsed from a text such as `(h k) d -> d h k`. A letter is one
    of our axes. Letters in parentheses are one axis on disk.

    Attributes:
      theirs: the letters of each axis on disk.
      ours: the letter of each axis in our layout.
      paired: the letter that is marked with ~, or "". Rotary positions pair neighbours along it on disk, but halves in
        our layout, so its elements are reordered.
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    paired: str = ""

    @classmethod
    @cache
    def parse(cls, text: str) -> Pattern:
        """Parses a pattern. Both sides have the same letters, each once."""
        left, _, right = text.partition("->")
        theirs = tuple(tuple(re.findall(r"\w", group)) for group in re.findall(r"\([^)]*\)|\w", left))
        ours = tuple(re.findall(r"\w", right))
        return cls(theirs, ours, "".join(re.findall(r"(\w)~", left)))

    def axis_of(self, part: str) -> tuple[int, bool]:
        """Finds the axis on disk whose last letters are `part`. Returns its index, and True if the axis has other
        letters before them: for "(h k) c -> ...", `k` gives (0, True) and `c` gives (1, False).
        """
        letters = tuple(part.split())
        axis = next(axis for axis, group in enumerate(self.theirs) if group[-len(letters) :] == letters)
        return axis, self.theirs[axis] != letters

    @property
    def outer(self) -> int:
        """Index of the axis of our layout that has the largest stride in the file."""
        return self.ours.index(self.theirs[0][0])

    def their_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of the tensor on disk. `sizes`: letter of the pattern -> number of elements."""
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.theirs)

    def our_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of the array in our layout. `sizes`: letter of the pattern -> number of elements."""
        return tuple(sizes[letter] for letter in self.ours)

    def their_spans(self, spans: Sequence[Span], sizes: Sizes) -> list[Span]:
        """Returns the (start, stop) along each axis on disk of the part to read, so that it contains a part in our
        layout.

        If an axis on disk has several letters, only the first letter can be limited. The part is complete along the
        other letters.

        Args:
          spans: (start, stop) of the part along each axis of our layout.
          sizes: letter of the pattern -> number of elements.
        """
        span_by_letter = dict(zip(self.ours, spans, strict=True)) | self._span_of_paired(sizes)
        their_spans = []
        for first, *rest in self.theirs:
            inner = math.prod(sizes[letter] for letter in rest)
            their_spans.append((span_by_letter[first][0] * inner, span_by_letter[first][1] * inner))
        return their_spans

    def forward(self, theirs: np.ndarray, spans: Sequence[Span], sizes: Sizes) -> np.ndarray:
        """Returns a part of a tensor in our layout. It is a copy if the pattern has a `paired` letter, otherwise a
        view.

        Args:
          theirs: what was read from disk, the part that `their_spans` returns.
          spans: (start, stop) of the wanted part along each axis of our layout.
          sizes: letter of the pattern -> number of elements.
        """
        span_by_letter = dict(zip(self.ours, spans, strict=True)) | self._span_of_paired(sizes)
        split, order = [], []
        for first, *rest in self.theirs:
            split += [span_by_letter[first][1] - span_by_letter[first][0], *(sizes[letter] for letter in rest)]
            order += [first, *rest]
        array = theirs.reshape(split).transpose([order.index(letter) for letter in self.ours])
        if self.paired:
            array = array.take(_disk_indices(sizes[self.paired], sizes["y"]), self.ours.index(self.paired))
        leading = {group[0] for group in self.theirs} - {self.paired}
        return array[
            tuple(slice(None) if letter in leading else slice(*span) for letter, span in zip(self.ours, spans))
        ]

    def back(self, ours: np.ndarray, rotated: int = 0) -> np.ndarray:
        """Returns a tensor in the layout on disk, from a tensor in our layout. This is the inverse of `forward`.

        `rotated`: number of elements along the `paired` letter that have rotary positions, if the pattern has such a
        letter. The tensor must be complete along that letter.
        """
        order = [letter for group in self.theirs for letter in group]
        if self.paired:
            axis = self.ours.index(self.paired)
            ours = ours.take(np.argsort(_disk_indices(ours.shape[axis], rotated)), axis)
        array = ours.transpose([self.ours.index(letter) for letter in order])
        sizes = dict(zip(self.ours, ours.shape, strict=True))
        return array.reshape(self.their_shape(sizes))

    def _span_of_paired(self, sizes: Sizes) -> dict[str, Span]:
        # All of it must be read, since neighbours on disk are far apart in our layout.
        return {self.paired: (0, sizes[self.paired])} if self.paired else {}


def _disk_indices(size: int, rotated: int) -> np.ndarray:
    """Returns the index on disk of each element in our layout, along an axis of `size` elements. Rotary positions apply
    to the last `rotated` elements: they pair neighbours on disk, and halves in our layout."""
    first = size - rotated
    return np.concatenate([np.arange(first), np.arange(first, size, 2), np.arange(first + 1, size, 2)])
