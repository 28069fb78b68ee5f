"""Tokenizes a text that is too long for one call, in overlapping windows, to exactly the token ids of the whole text.

If parts of a text are encoded separately, the ids at the cut are wrong, since a word is split or a space is put before
each part. Here every window begins `OVERLAP` characters before the end of the previous window, so the overlap is
tokenized twice. In the overlap, the longest run of tokens that both windows have at the same place is found; ids up to
its middle are taken from the earlier window, ids after it from the later one. The run must have `AGREED` tokens or
more. If there is no such run, for example in a word of a million characters, the two windows are merged into one and
tokenized again; in the worst case, this window becomes the whole text.

Why the ids are correct: merges of BPE on the two sides of a boundary do not depend on each other, and a merge across a
boundary p depends only on the tokens at p at the time of the merge. Two windows that share the token left of p, and p
itself, have formed the tokens at p in the same order, one with all of the text before p, one with all of the text
after p. Neither merges across p, so the whole text does not either. Patterns that split a text into words match from
left to right, so they match equally from a shared boundary on; WordPiece and Unigram work word by word. Unigram
without words weighs the whole text at once. There a run of `AGREED` tokens is strong evidence, but no proof.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from bytescope.train.user_errors import UserError

OVERLAP = 8192  # characters
AGREED = 32  # tokens
AT_ONCE = 4  # number of windows that are encoded in parallel

# Function from texts to (ids [n], span of characters of each token [n, 2]) of each text.
Encode = Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class Window:
    """A part of a text and its tokens.

    Attributes:
      start: index in the whole text of the part's first character.
      text: the part.
      ids: token ids, unsigned [n].
      spans: span [from, to) of the characters of each token, as indices in the whole text, int64 [n, 2].
    """

    start: int
    text: str
    ids: np.ndarray
    spans: np.ndarray

    @property
    def stop(self) -> int:
        """Index in the whole text of the character after the window."""
        return self.start + len(self.text)


def encode_long(pieces: Iterable[str], encode: Encode) -> Iterator[np.ndarray]:
    """Yields the token ids of the concatenated `pieces` in parts. Together they are equal to the ids of the whole text.

    `encode`: a function that tokenizes a list of texts. It returns (token ids [n], character span of each token [n, 2])
    for each text.

    Raises UserError if a token depends on text that is further away than the size of a window, the part of the text
    that is tokenized at a time.
    """
    last: Window | None = None
    first = 0  # index of the first token of `last` that was not yielded yet
    waiting = ""  # text after `last` whose window could not be joined
    for window in _tokenize_windows(pieces, encode):
        if last is None:
            last = window
            continue
        joint = None if waiting else _find_joint(last, first, window)
        if joint:
            yield last.ids[first : joint[0]]
            last, first = window, joint[1]
            continue
        waiting += window.text[last.stop + len(waiting) - window.start :]
        if len(waiting) >= len(last.text):  # the window doubles each time, so the total work is linear in the text
            last, waiting = _extend_window(last, first, waiting, encode), ""
    if last is not None:
        yield (_extend_window(last, first, waiting, encode) if waiting else last).ids[first:]


def _tokenize_windows(pieces: Iterable[str], encode: Encode) -> Iterator[Window]:
    """Tokenizes each piece of text together with up to `OVERLAP` characters before it. Yields one window per piece.

    `encode`: a function that tokenizes a list of texts. It returns (token ids [n], character span of each token [n, 2])
    for each text.
    """
    pieces, before, position = iter(pieces), "", 0
    while at_once := list(islice(pieces, AT_ONCE)):
        texts = []
        for piece in at_once:
            texts.append((position - len(before), before + piece))
            position += len(piece)
            before = texts[-1][1][-OVERLAP:]
        for (start, text), (ids, spans) in zip(texts, encode([text for _, text in texts]), strict=True):
            yield Window(start, text, ids, spans + start)


def _find_joint(earlier: Window, first: int, window: Window) -> tuple[int, int] | None:
    """Finds the place where two overlapping windows can be joined: the middle of the longest run of tokens that both
    contain. Returns the index of this token in `earlier` and in `window`, or None if the run has fewer than `AGREED`
    tokens.

    Tokens of `earlier` before index `first` are ignored.
    """
    begin = max(first, int(np.searchsorted(earlier.spans[:, 0], window.start)))
    end = int(np.searchsorted(window.spans[:, 1], earlier.stop, side="right"))
    place = {token: begin + i for i, token in enumerate(_comparable_tokens(earlier, slice(begin, None)))}
    best, run, previous_index = (0, 0, 0), 0, -2
    for j, token in enumerate(_comparable_tokens(window, slice(end))):
        i = place.get(token, -2)
        run = run + 1 if i >= 0 and i == previous_index + 1 else int(i >= 0)
        previous_index = i
        best = max(best, (run, i, j))
    length, i, j = best
    half = length // 2
    return (i - half, j - half) if length >= AGREED else None


def _comparable_tokens(window: Window, part: slice) -> list[tuple[int, int, int, int]]:
    rows: list[tuple[int, int, int, int]] = []
    seen: Counter[tuple[int, int, int]] = Counter()
    for i, (start, stop) in zip(window.ids[part].tolist(), window.spans[part].tolist(), strict=True):
        # Equal rows of two windows are the same token. The count distinguishes equal tokens of one character.
        seen[i, start, stop] += 1
        rows.append((i, start, stop, seen[i, start, stop]))
    return rows


def _extend_window(window: Window, first: int, more: str, encode: Encode) -> Window:
    """Returns `window` extended by the text `more`, which follows it, and tokenized again.

    Args:
      window: the last window, of which the tokens before index `first` were already yielded.
      first: index of the first token to yield; 0 at the beginning of the text.
      more: the text to append.
      encode: a function that tokenizes a list of texts. It returns (token ids [n], character span of each token [n, 2])
        for each text.

    Raises UserError if this changes token ids that were already yielded.
    """
    text = window.text + more
    ((ids, spans),) = encode([text])
    spans, settled = spans + window.start, min(first + AGREED // 2, len(window.ids)) if first else 0
    if not (
        np.array_equal(ids[:settled], window.ids[:settled]) and np.array_equal(spans[:settled], window.spans[:settled])
    ):
        raise UserError(
            f"the tokenizer's ids at character {window.start:,} of a text depend on text more than "
            f"{len(window.text):,} characters later: divide the text into shorter files"
        )
    return Window(window.start, text, ids, spans)
