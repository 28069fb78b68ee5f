"""Packs examples into rows: several in a row if they fit, each with its own segment id.

The rows are chosen once, from the lengths alone, so that the state of a reader stays one integer, and every epoch
visits every example once.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np

from bytescope.train.data.batch_algebra import IGNORE


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each example, int64 [n], by best fit in order of decreasing length.

    Each goes into the fullest row that has room for it (Ding et al. 2024, arXiv 2404.10830): at most 11/9 of the least
    number of rows there can be, and a few more (Johnson et al. 1974, doi 10.1137/0203025).

    Args:
      lengths: int [n], at most `capacity` each.
    """
    rows = np.zeros(len(lengths), np.int64)
    open_rows: dict[int, list[int]] = {}  # room -> the rows that have so much
    rooms: list[int] = []  # the keys, in order
    count = 0
    for example in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[example])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room, count = count, capacity, count + 1
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        rows[example] = row
        if left := room - length:
            if left not in open_rows:
                open_rows[left] = []
                insort(rooms, left)
            open_rows[left].append(row)
    return rows


class ExampleSource:
    """Rows of examples, by number.

    `len(source)` is the number of rows, `source.examples` that of the examples, `source.tokens` that of their tokens,
    `source.learned` that of the targets with a loss, `source.order` the examples row by row. An example of n tokens
    takes n - 1 positions: each token but the last predicts the next one, and nothing predicts another example's first.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        learned: np.ndarray,
        starts: np.ndarray,
        chosen: np.ndarray,
        *,
        seq_len: int,
        packing: bool,
        vocab_size: int,
    ):
        """Args:
        tokens: unsigned [t], of all examples; learned: bool [t], whether a token is a target.
        starts: int64 [n + 1], where each example begins in them. chosen: int [m], the examples of this source.
        """
        self.seq_len, self.packing, self.vocab_size = seq_len, packing, vocab_size
        self._tokens, self._learned, self._starts = tokens, learned, starts
        lengths = starts[chosen + 1] - starts[chosen] - 1
        rows = pack(lengths, seq_len) if packing else np.arange(len(chosen))
        self.order = chosen[np.argsort(rows, kind="stable")]
        self._rows = np.concatenate([[0], np.cumsum(np.bincount(rows))]) if len(rows) else np.zeros(1, np.int64)
        self.examples, self.tokens = len(chosen), int((lengths + 1).sum())
        before = np.concatenate([[0], np.cumsum(learned)])  # learned tokens before each
        self.learned = int((before[starts[chosen + 1]] - before[starts[chosen] + 1]).sum())
        self.filled = float(lengths.sum() / max(len(self) * seq_len, 1))  # share of positions that are not padding

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i: inputs, targets and, with packing, segments, int32 [seq_len]. Raises IndexError past the
        end."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        row = self._padding()
        at = 0
        for segment, example in enumerate(self.order[self._rows[i] : self._rows[i + 1]].tolist(), 1):
            part = slice(self._starts[example], self._starts[example + 1])
            tokens, learned = self._tokens[part].astype(np.int32), self._learned[part]
            place = slice(at, at + len(tokens) - 1)
            row["inputs"][place] = tokens[:-1]
            row["targets"][place] = np.where(learned[1:], tokens[1:], IGNORE)
            if self.packing:
                row["segments"][place] = segment
            at = place.stop
        return row

    def batch(self, numbers: Iterable[int], stop: int | None = None) -> dict[str, np.ndarray]:
        """Returns the rows with these numbers, int32 [n, seq_len] per array; rows from `stop`, or the end, are padding.

        Without packing it contains `mask` too: 1 for a token, 0 for padding.
        """
        end = len(self) if stop is None else min(stop, len(self))
        numbers = [int(i) for i in numbers]
        rows = [self[i] if i < end else self._padding() for i in numbers]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        if not self.packing:
            batch["mask"] = np.zeros_like(batch["inputs"])
            for mask, i in zip(batch["mask"], numbers):
                if i < end:
                    example = self.order[i]
                    mask[: self._starts[example + 1] - self._starts[example] - 1] = 1
        return batch

    def _padding(self) -> dict[str, np.ndarray]:
        row = {"inputs": np.zeros(self.seq_len, np.int32), "targets": np.full(self.seq_len, IGNORE, np.int32)}
        return {**row, "segments": np.zeros(self.seq_len, np.int32)} if self.packing else row
