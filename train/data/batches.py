"""Batches of token windows, or of rows of examples. The n-th sequence of a run depends only on the seed and on n.

The documents of a source are one long stream of tokens, which is cut into windows of seq_len + 1 tokens that overlap
by one token. Examples (`data.format`) come in rows (examples.py). Epoch e visits every window or row once, in an order
shuffled with the key (seed, e). So the state of the reader is a single integer, the number of consumed sequences. The
number of processes and the division of a batch do not change the data.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

import grain
import numpy as np

from bytescope.memory.units import plural
from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.data.corpus import ShardFiles, find
from bytescope.train.data.documents import RecordTexts, TextDocuments
from bytescope.train.data.examples import open_examples
from bytescope.train.data.packing import ExampleSource
from bytescope.train.data.records import RecordFiles, left_out
from bytescope.train.data.settings import DataConfig
from bytescope.train.data.shards import Shards, open_shards
from bytescope.train.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer, load_tokenizer
from bytescope.train.user_errors import UserError

Batch = dict[str, np.ndarray]
Source = TextDocuments | RecordTexts | Shards


class TokenSource:
    """A stream of tokens that is divided into windows of seq_len + 1 tokens.

    `len(source)` is the number of windows, and `source[i]` is window i, int32 [seq_len + 1]. `tokens` is the number of
    tokens in the stream.

    Args:
      arrays: the tokens of the stream, as consecutive arrays of integers.
      seq_len: tokens per sequence.
      vocab_size: token ids must be below this number.
      keep_tail: True to pad an incomplete window at the end with `IGNORE`, a target without loss; False to drop it.
    """

    def __init__(self, arrays: Sequence[np.ndarray], seq_len: int, vocab_size: int, keep_tail: bool):
        self.seq_len, self.vocab_size, self.keep_tail = seq_len, vocab_size, keep_tail
        self._arrays = [array for array in arrays if len(array)]
        self._starts = [0, *accumulate(len(array) for array in self._arrays)]
        self.tokens = self._starts[-1]

    def __len__(self) -> int:
        targets = max(self.tokens - 1, 0)
        return -(-targets // self.seq_len) if self.keep_tail else targets // self.seq_len

    def __getitem__(self, i: int) -> np.ndarray:
        """Returns window i, int32 [seq_len + 1]. Raises UserError for a token outside the vocabulary."""
        window = np.full(self.seq_len + 1, IGNORE, np.int32)
        start = i * self.seq_len
        stop = min(start + self.seq_len + 1, self.tokens)
        # A window may span several shards, so that their size changes no window.
        at, part = start, bisect_right(self._starts, start) - 1
        while at < stop:
            tokens = self._arrays[part][at - self._starts[part] : stop - self._starts[part]]
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
                raise UserError(
                    f"tokens {at:,} to {at + len(tokens):,} contain the id {tokens.max()}, outside "
                    f"the vocabulary of {self.vocab_size}: a shard is damaged, prepare the shards again"
                )
            window[at - start : at - start + len(tokens)] = tokens
            at, part = at + len(tokens), part + 1
        return window

    def windows(self, numbers: Iterable[int], stop: int | None = None) -> np.ndarray:
        """Returns the windows with these indices, int32 [n, seq_len + 1]. A window whose index is `stop` or more, or
        past the end of the source, is filled with `IGNORE`, a target without loss.
        """
        padding = np.full(self.seq_len + 1, IGNORE, np.int32)
        end = len(self) if stop is None else min(stop, len(self))
        return np.stack([self[int(i)] if i < end else padding for i in numbers])

    def batch(self, numbers: Iterable[int], stop: int | None = None) -> Batch:
        """Returns the windows with these indices as inputs and targets, each int32 [n, seq_len]. A window whose index
        is `stop` or more, or past the end of the source, is padding: its targets have no loss.
        """
        windows = self.windows(numbers, stop)
        # Padding has no loss, but as an input it must still be a valid token id.
        return {"inputs": np.maximum(windows[:, :-1], 0), "targets": np.ascontiguousarray(windows[:, 1:])}


@dataclass(frozen=True)
class Data:
    """The training data and held-out data of a run.

    Attributes:
      train: the rows to train on.
      heldout: the held-out rows.
      vocab_size: 1 plus the largest token id that can occur.
      fingerprint: hash of the content.
      description: one line about the data, to show to the user.
      tokenizer: the tokenizer of the data.
    """

    train: TokenSource | ExampleSource
    heldout: TokenSource | ExampleSource
    vocab_size: int
    fingerprint: str
    description: str
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the token ids. Ids that are not valid become U+FFFD."""
        return self.tokenizer.decode(ids)


def open_data(config: DataConfig) -> Data:
    """Opens the data of `config`: finds the files, tokenizes texts, maps token shards into memory, and splits off the
    held-out part.

    Raises UserError with a remedy if data are missing, damaged, not text, or too small.
    """
    if config.format != "text":
        tokenizer = load_tokenizer(config.tokenizer, special_tokens=config.special_tokens)
        rows, held_out_rows, fingerprint, description = open_examples(config, tokenizer)
        return Data(rows, held_out_rows, tokenizer.vocab_size, fingerprint, description, tokenizer)
    source = _find(config, "source")
    sources = [source]
    if config.eval_source:
        sources.append(_find(config, "eval_source"))
        parts: tuple[Source, Source] = (source.training_part(), sources[1].held_out_part())
        if common := parts[0].paths & parts[1].paths:
            raise UserError(
                f"data.eval_source={config.eval_source!r} contains {min(common).name}, which the "
                "run trains on: give other files, or leave data.eval_source empty"
            )
        train_part, held_out_part = parts
        # Two branches, so that mypy knows the type of each part.
        if isinstance(train_part, TextDocuments) and isinstance(held_out_part, TextDocuments):  # noqa: SIM114
            parts = train_part.without(held_out_part), held_out_part
        elif isinstance(train_part, RecordTexts) and isinstance(held_out_part, RecordTexts):
            parts = train_part.without(held_out_part), held_out_part
    else:
        parts = source.split()
    tokenizer = _choose_tokenizer(config, sources)
    vocab_size = max(one.vocab_size(tokenizer) for one in sources)
    all_shards = all(isinstance(one, Shards) for one in sources)
    if all_shards and tokenizer.name == ByteTokenizer.name and vocab_size > tokenizer.vocab_size:
        tokenizer = IdTokenizer(vocab_size)  # the shards are not bytes, and record no tokenizer

    digest = blake2b(tokenizer.identity.encode(), digest_size=8)
    if config.special_tokens != "text":
        digest.update(f"special_tokens={config.special_tokens}".encode())
    windows = []
    for part, held_out in zip(parts, (False, True), strict=True):
        arrays = part.arrays(tokenizer)
        digest.update(part.identity(arrays))
        windows.append(TokenSource(arrays, config.seq_len, vocab_size, keep_tail=held_out))
    train, heldout = windows
    _refuse_too_little(config, train, heldout, "; ".join(left_out(parts[0].malformed, parts[0].copies)))
    description = _describe(config, parts, train, heldout, tokenizer)
    return Data(train, heldout, vocab_size, digest.hexdigest(), description, tokenizer)


def check_vocab(data: Data, vocab_size: int) -> None:
    """Raises UserError if the data may contain a token id that is not below `vocab_size`, the size of the model's
    vocabulary.
    """
    if data.vocab_size > vocab_size:
        raise UserError(
            f"the data contain token ids up to {data.vocab_size - 1}, and model.vocab_size is "
            f"{vocab_size}: set --config.model.vocab_size={data.vocab_size} or more"
        )


def train_batches(
    data: Data, *, rows: int, row_slices: Sequence[slice] | None = None, seed: int, position: int, config: DataConfig
) -> grain.DatasetIterator:
    """Returns an endless iterator over the training batches. Each item contains the rows of a batch that this process
    reads.

    Each item has "inputs" and "targets", both int32 [rows of this process, seq_len]. If examples are packed, it also
    has "segments", which numbers the examples of a row from 1; 0 marks padding. If each row has one example, it also
    has "mask", which is 1 for a token and 0 for padding.

    Args:
      data: the opened data.
      rows: number of sequences of the global batch.
      row_slices: the slices of the batch's rows that this process reads, in order; None if it reads all rows.
      seed: seed of the order of the rows.
      position: number of sequences to skip, which all processes together have consumed before.
      config: the config group `data`.

    Raises:
      UserError: a shard is damaged; the iterator raises this.
    """
    mine, source = _own_rows(rows, row_slices), data.train
    # grain shuffles epoch e with seed + e. The seed is hashed, so that seeds that differ by 1 do not share orders.
    shuffle_seed = int.from_bytes(blake2b(str(seed).encode(), digest_size=4).digest(), "big")
    sequences = grain.MapDataset.range(len(source)).shuffle(seed=shuffle_seed).repeat()[position:]
    # There is no remainder, but drop_remainder=False would round the endless length up beyond the maximum of len().
    numbers = sequences.batch(rows, drop_remainder=True)
    return iter(
        numbers.map(lambda batch: source.batch(batch[mine])).to_iter_dataset(
            _read_options(config.workers, config.prefetch)
        )
    )


def heldout_batches(
    data: Data, *, rows: int, sequences: int | None = None, row_slices: Sequence[slice] | None = None
) -> Iterator[Batch]:
    """Returns an iterator over the held-out batches. Each held-out token is a target exactly once, and tokens keep
    their order.

    Each item has "inputs" and "targets", and for examples also "segments" or "mask", as in `train_batches`. The last
    window and the last batch are padded with targets of `IGNORE`, which have no loss. Every process gets the same
    number of batches.

    Args:
      data: the opened data.
      rows: number of sequences of the global batch.
      sequences: number of windows to read from the beginning, independent of the batch size; None for all windows.
      row_slices: the slices of the batch's rows that this process reads, in order; None if it reads all rows.
    """
    mine, source = _own_rows(rows, row_slices), data.heldout
    count = len(source) if sequences is None else min(sequences, len(source))
    steps = -(-count // rows)
    numbers = grain.MapDataset.range(steps).map(lambda step: step * rows + mine)
    return iter(
        numbers.map(lambda batch: source.batch(batch, count)).to_iter_dataset(_read_options(workers=1, prefetch=2))
    )


def _own_rows(rows: int, row_slices: Sequence[slice] | None) -> np.ndarray:
    every = np.arange(rows)
    return every if row_slices is None else np.concatenate([every[:0], *(every[s] for s in row_slices)])


def _read_options(workers: int, prefetch: int) -> grain.ReadOptions:
    # Each thread reads a whole batch, so more threads than prefetched batches would be idle. With 0 threads, the caller
    # reads.
    return grain.ReadOptions(num_threads=min(workers, prefetch), prefetch_buffer_size=prefetch)


def _find(config: DataConfig, key: str) -> Source:
    source = find(getattr(config, key), f"data.{key}")
    if isinstance(source, RecordFiles):
        return RecordTexts(source, config.field, config.skip_bad)
    return open_shards(source, config.dtype) if isinstance(source, ShardFiles) else source


def _choose_tokenizer(config: DataConfig, sources: Sequence[Source]) -> Tokenizer:
    """Returns the tokenizer that the token shards were prepared with. If the data are not token shards, returns the
    tokenizer that `data.tokenizer` names.

    Raises UserError if the shards were prepared with another tokenizer than `data.tokenizer` names.
    """
    recorded = [one.recorded_tokenizer for one in sources if one.recorded_tokenizer]
    asked = config.tokenizer != ByteTokenizer.name or not recorded
    tokenizer = load_tokenizer(config.tokenizer if asked else recorded[0][0], special_tokens=config.special_tokens)
    for path, identity in recorded:
        if identity != tokenizer.identity:
            raise UserError(
                f"shards were prepared with {path} ({identity}), but the tokenizer of this run is "
                f"{tokenizer.name} ({tokenizer.identity}): leave data.tokenizer at 'bytes' to "
                "use the tokenizer of the shards, or prepare the shards again"
            )
    return tokenizer


def _refuse_too_little(config: DataConfig, train: TokenSource, heldout: TokenSource, notes: str) -> None:
    if not len(train):
        raise UserError(
            f"data.source={config.source!r} has {train.tokens:,} tokens to train on"
            f"{f' ({notes})' if notes else ''}, and a window needs data.seq_len + 1 = {config.seq_len + 1:,}: "
            "give more text or lower data.seq_len"
        )
    if not len(heldout):
        raise UserError(
            f"data.source={config.source!r} has {heldout.tokens:,} held-out tokens, fewer "
            "than 2: give more data, or set data.eval_source"
        )


def _describe(
    config: DataConfig, parts: tuple[Source, Source], train: TokenSource, heldout: TokenSource, tokenizer: Tokenizer
) -> str:
    titles = [part.title for part in parts]
    held_out_source = f" of {titles[1]}" if titles[1] != titles[0] else ""
    notes = [f"{tokenizer.name}, vocabulary {train.vocab_size:,}"]
    if tokenizer.separator is None and any(isinstance(part, TextDocuments | RecordTexts) for part in parts):
        notes.append("no separator between documents (the tokenizer has no end-of-text token)")
    if config.special_tokens == "parse":
        notes.append("special tokens written in the text are parsed")
    if skipped := sum({part.title: part.skipped for part in parts}.values()):
        notes.append(f"{plural(skipped, 'binary file')} left out")
    notes += left_out(sum({part.title: part.malformed for part in parts}.values()), sum(part.copies for part in parts))
    return (
        f"{titles[0]}: {parts[0].count()}, {train.tokens:,} tokens; "
        f"held out {parts[1].count()}{held_out_source}, {heldout.tokens:,} tokens; {'; '.join(notes)}"
    )
