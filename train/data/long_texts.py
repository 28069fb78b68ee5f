"""Encodes a text that is too long for one call, in overlapping windows, to the token ids of the whole text.

Encoded apart, two parts of a text have other ids at the cut: a word is torn, a space is put before each part. Here
every window begins `OVERLAP` characters before the last one ended, and the two are joined in the middle of the longest
run of tokens that both have at the same place of the text, `AGREED` or more. Where there is no such run, as within a
word of a million characters, the windows become one, in the end the whole text.

Why the ids are those of the whole: merges of BPE on the two sides of a boundary do not depend on each other, and a
merge across a boundary p depends on the tokens at p alone, as they are when its turn comes. Two windows that share the
token left of p, and p itself, have made the tokens there in the same order, one with all of the text before, one with
all that follows; neither merges across p, so neither does the whole. Patterns that split a text into words are searched
from left to right, so that they go on alike from a boundary that both have; WordPiece and Unigram work word by word.
Unigram without words weighs the whole text at once: there a run of `AGREED` tokens is strong evidence, and no proof.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from bytescope.train.user_errors import UserError

OVERLAP = 8192  # characters
AGREED = 32  # tokens
AT_ONCE = 4  # windows encoded in parallel

# Texts -> for each its ids [n] and the characters [n, 2] that every token stands for, from and to.
Encode = Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class Window:
    """A part of a text from character `start` on. ids: unsigned [n]; spans: int64 [n, 2], characters of the text."""

    start: int
    text: str
    ids: np.ndarray
    spans: np.ndarray

    @property
    def stop(self) -> int:
        """The character behind the last."""
        return self.start + len(self.text)


def encode_long(pieces: Iterable[str], encode: Encode) -> Iterator[np.ndarray]:
    """Yields the ids of the text that `pieces` add up to, as encoding it whole would give them.

    Raises UserError where a token changes by what stands further behind it than a window reaches.
    """
    held: Window | None = None
    first = 0  # token of `held` that was not yielded yet
    waiting = ""  # text behind `held` whose window did not agree with it
    for window in _windows(pieces, encode):
        if held is None:
            held = window
            continue
        joint = None if waiting else _joint(held, first, window)
        if joint:
            yield held.ids[first : joint[0]]
            held, first = window, joint[1]
            continue
        waiting += window.text[held.stop + len(waiting) - window.start :]
        if len(waiting) >= len(held.text):  # twice as long each time: the work stays in proportion to the text
            held, waiting = _longer(held, first, waiting, encode), ""
    if held is not None:
        yield (_longer(held, first, waiting, encode) if waiting else held).ids[first:]


def _windows(pieces: Iterable[str], encode: Encode) -> Iterator[Window]:
    """Yields each piece with up to `OVERLAP` characters of what stands before it."""
    pieces, before, position = iter(pieces), "", 0
    while at_once := list(islice(pieces, AT_ONCE)):
        texts = []
        for piece in at_once:
            texts.append((position - len(before), before + piece))
            position += len(piece)
            before = texts[-1][1][-OVERLAP:]
        for (start, text), (ids, spans) in zip(texts, encode([text for _, text in texts]), strict=True):
            yield Window(start, text, ids, spans + start)


def _joint(held: Window, first: int, window: Window) -> tuple[int, int] | None:
    """Returns the middle of the longest run of tokens that both windows have, as an index into each; None if no run is
    long enough. Tokens of `held` before `first` do not count."""
    begin = max(first, int(np.searchsorted(held.spans[:, 0], window.start)))
    end = int(np.searchsorted(window.spans[:, 1], held.stop, side="right"))
    place = {token: begin + i for i, token in enumerate(_tokens(held, slice(begin, None)))}
    best, run, last = (0, 0, 0), 0, -2
    for j, token in enumerate(_tokens(window, slice(end))):
        i = place.get(token, -2)
        run = run + 1 if i >= 0 and i == last + 1 else int(i >= 0)
        last = i
        best = max(best, (run, i, j))
    length, i, j = best
    half = length // 2
    return (i - half, j - half) if length >= AGREED else None


def _tokens(window: Window, part: slice) -> list[tuple[int, int, int, int]]:
    """Returns (id, from, to, number) of each token. The number distinguishes tokens of one character with the same
    id."""
    rows: list[tuple[int, int, int, int]] = []
    seen: Counter[tuple[int, int, int]] = Counter()
    for i, (start, stop) in zip(window.ids[part].tolist(), window.spans[part].tolist(), strict=True):
        seen[i, start, stop] += 1
        rows.append((i, start, stop, seen[i, start, stop]))
    return rows


def _longer(held: Window, first: int, more: str, encode: Encode) -> Window:
    """Returns `held` extended by the text `more`. Raises UserError if the ids that were yielded already would
    change."""
    text = held.text + more
    ((ids, spans),) = encode([text])
    spans, settled = spans + held.start, min(first + AGREED // 2, len(held.ids)) if first else 0
    if not (
        np.array_equal(ids[:settled], held.ids[:settled]) and np.array_equal(spans[:settled], held.spans[:settled])
    ):
        raise UserError(
            f"the tokenizer's ids at character {held.start:,} of a text change by what stands more than "
            f"{len(held.text):,} characters behind: divide the text into shorter files"
        )
    return Window(held.start, text, ids, spans)
