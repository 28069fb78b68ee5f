"""Packs examples into rows: several examples per row if they fit, each with its own segment id.

Rows are chosen once, from the lengths only. So the state of a reader is a single integer, and every epoch visits every
example once.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np

from bytescope.train.data.batch_algebra import IGNORE


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assigns examples to rows by best fit in order of decreasing length. Returns the row of each example, int64 [n].

    Each example goes into the fullest row that has room for it (Ding et al. 2024, arXiv 2404.10830). The number of
    rows is at most 11/9 of the minimum plus a constant (Johnson et al. 1974, doi 10.1137/0203025).

    Args:
      lengths: length of each example, int [n], at most `capacity`.
      capacity: length of a row.
    """
    rows = np.zeros(len(lengths), np.int64)
    open_rows: dict[int, list[int]] = {}  # free positions -> rows with this many free positions
    rooms: list[int] = []  # the keys of open_rows, sorted
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
    """Examples arranged in rows. `len(source)` is the number of rows, and `source[i]` is row i.

    An example of n tokens fills n - 1 positions of a row, since each token except the last predicts the next one.

    Args:
      tokens: token ids of all examples, unsigned [t].
      learned: True for each token that is a target with loss, bool [t].
      starts: index of the first token of each example, then t, int64 [n + 1].
      chosen: indices of the examples that belong to this source, int [m].
      seq_len: positions per row.
      packing: True to put several examples into a row, False for one example per row.
      vocab_size: size of the vocabulary.

    Attributes:
      examples: number of examples.
      tokens: number of tokens of these examples.
      learned: number of targets with loss.
      order: indices of the examples, row by row.
      filled: fraction of positions that are not padding, 0 to 1.
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
        self.seq_len, self.packing, self.vocab_size = seq_len, packing, vocab_size
        self._tokens, self._learned, self._starts = tokens, learned, starts
        lengths = starts[chosen + 1] - starts[chosen] - 1
        rows = pack(lengths, seq_len) if packing else np.arange(len(chosen))
        self.order = chosen[np.argsort(rows, kind="stable")]
        self._rows = np.concatenate([[0], np.cumsum(np.bincount(rows))]) if len(rows) else np.zeros(1, np.int64)
        self.examples, self.tokens = len(chosen), int((lengths + 1).sum())
        before = np.concatenate([[0], np.cumsum(learned)])  # number of learned tokens before each token
        self.learned = int((before[starts[chosen + 1]] - before[starts[chosen] + 1]).sum())
        self.filled = float(lengths.sum() / max(len(self) * seq_len, 1))  # fraction of positions that are not padding

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns the inputs and targets of row i, each int32 [seq_len]. If examples are packed, also returns
        `segments`, which numbers the examples of the row from 1; 0 marks padding.
        """
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
        """Returns the rows with these indices, each array int32 [n, seq_len]. A row whose index is `stop` or more, or
        past the end of the source, is padding.

        If examples are not packed, the batch also has `mask`, which is 1 for a token and 0 for padding.
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
