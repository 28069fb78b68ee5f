import random
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescope.train.data.batches import (
    IGNORE,
    Data,
    TokenSource,
    check_vocab,
    heldout_batches,
    open_data,
    train_batches,
)
from bytescope.train.data.tokenizer import ByteTokenizer
from bytescope.train.user_errors import UserError
from support.text_data import config, save_tokenizer, write

pytestmark = pytest.mark.quick


def numbered(train_tokens=4 * 23 + 1, heldout_tokens=11, seq_len=4, source=TokenSource):
    """Data whose tokens are their own positions, so that every window names itself."""
    vocab = max(train_tokens, heldout_tokens)
    sources = [
        source([np.arange(n, dtype=np.uint32)], seq_len, vocab, keep_tail=tail)
        for n, tail in ((train_tokens, False), (heldout_tokens, True))
    ]
    return Data(*sources, vocab_size=vocab, fingerprint="", description="", tokenizer=ByteTokenizer())


def sequences(data, count, *, rows=1, seed=0, position=0, **changes):
    """The first `count` windows from `position` on, as rows of inputs and the last target."""
    batches = train_batches(data, rows=rows, seed=seed, position=position, config=config(**changes))
    taken = [next(batches) for _ in range(-(-count // rows))]
    batches.close()
    for batch in taken:
        assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
        assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    joined = {name: np.concatenate([batch[name] for batch in taken]) for name in ("inputs", "targets")}
    return np.column_stack([joined["inputs"], joined["targets"][:, -1]])[:count]


DATA = numbered()
WINDOWS = len(DATA.train)
STREAM = sequences(DATA, 3 * WINDOWS)


def test_an_epoch_visits_every_window_once_and_each_in_its_own_order():
    assert WINDOWS == 23
    orders = []
    for epoch in range(3):
        windows = STREAM[epoch * WINDOWS : (epoch + 1) * WINDOWS]
        assert np.array_equal(windows, windows[:, :1] + np.arange(5))
        orders.append((windows[:, 0] // 4).tolist())
        assert sorted(orders[-1]) == list(range(WINDOWS)) != orders[-1]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_order_follows_the_seed_alone():
    assert np.array_equal(sequences(DATA, 50), STREAM[:50])
    seeds = [sequences(DATA, 3 * WINDOWS, seed=seed) for seed in (1, 2, -1, 2**40)]
    assert all(not np.array_equal(other, STREAM) for other in seeds)
    # Not the same orders one epoch later either, as adding the epoch to the seed would give.
    assert not np.array_equal(STREAM[WINDOWS : 2 * WINDOWS], seeds[0][:WINDOWS])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 4), st.integers(0, 3))
def test_a_restart_anywhere_continues_the_stream(position, rows, prefetch, workers):
    found = sequences(DATA, 9, rows=rows, position=position, prefetch=prefetch, workers=workers)
    assert np.array_equal(found, STREAM[position : position + 9])


def test_a_late_position_costs_nothing_and_is_exact():
    far = 10**12 + 7
    assert np.array_equal(sequences(DATA, 5, position=far)[2:], sequences(DATA, 3, position=far + 2))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=12, max_size=12), st.integers(1, 4), st.integers(0, 40))
def test_the_rows_of_all_processes_make_up_the_batch(owners, processes, position):
    rows, owners = len(owners), [owner % processes for owner in owners]
    whole = next(train_batches(DATA, rows=rows, seed=0, position=position, config=config()))
    for process in set(owners):
        mine = [row for row in range(rows) if owners[row] == process]
        part = next(
            train_batches(
                DATA,
                rows=rows,
                row_slices=[slice(row, row + 1) for row in mine],
                seed=0,
                position=position,
                config=config(),
            )
        )
        assert all(np.array_equal(part[name], whole[name][mine]) for name in whole)


def test_each_process_reads_only_its_rows():
    read = []

    class Counting(TokenSource):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)

    data = numbered(source=Counting)
    batches = train_batches(
        data, rows=8, row_slices=[slice(0, 2), slice(6, 7)], seed=0, position=8, config=config(prefetch=0)
    )
    batch = next(batches)
    assert np.array_equal(batch["inputs"][:, 0], STREAM[[8, 9, 14], 0])
    assert read == (STREAM[[8, 9, 14], 0] // 4).tolist()


def test_a_slow_source_loses_and_reorders_nothing():
    delays = random.Random(0)

    class Slow(TokenSource):
        def __getitem__(self, i):
            time.sleep(delays.random() * 0.004)
            return super().__getitem__(i)

    assert np.array_equal(sequences(numbered(source=Slow), 60, rows=2, prefetch=8, workers=8), STREAM[:60])


def test_a_failing_reader_stops_the_run_with_its_own_message():
    damaged = TokenSource([np.full(100, 300, np.uint16)], 4, 256, keep_tail=False)
    data = Data(damaged, DATA.heldout, 256, "", "", ByteTokenizer())
    with pytest.raises(UserError, match=r"contain the id 300, outside the vocabulary of 256: a shard is"):
        next(train_batches(data, rows=2, seed=0, position=0, config=config()))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.integers(1, 9), st.integers(1, 5))
def test_every_held_out_token_is_a_target_once(tokens, seq_len, rows):
    data = numbered(heldout_tokens=tokens, seq_len=seq_len)
    batches = list(heldout_batches(data, rows=rows))
    assert all(batch["inputs"].shape == batch["targets"].shape == (rows, seq_len) for batch in batches)
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    inputs = np.concatenate([batch["inputs"].ravel() for batch in batches])
    counted = targets != IGNORE
    # The very first token has nothing before it, so it is no target.
    assert targets[counted].tolist() == list(range(1, tokens))
    assert np.array_equal(inputs[counted], targets[counted] - 1) and inputs.min() >= 0


def test_held_out_batches_are_limited_and_parted():
    whole = list(heldout_batches(DATA, rows=2))
    assert len(whole) == 2 and whole[1]["targets"].tolist() == [[9, 10, IGNORE, IGNORE], [IGNORE] * 4]
    for rows in (1, 2, 3):  # the first two windows, however they are cut into batches
        first = np.concatenate([batch["targets"] for batch in heldout_batches(DATA, rows=rows, sequences=2)])
        counted = first[(first != IGNORE).any(1)]
        np.testing.assert_array_equal(counted, DATA.heldout.windows(range(2))[:, 1:])
    for row in range(2):
        part = list(heldout_batches(DATA, rows=2, row_slices=[slice(row, row + 1)]))
        assert all(np.array_equal(p["targets"], w["targets"][[row]]) for p, w in zip(part, whole))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_windows_do_not_depend_on_the_size_of_shards(sizes, seq_len):
    stream = np.arange(sum(sizes), dtype=np.uint16)
    whole = TokenSource([stream], seq_len, 1000, keep_tail=True)
    parted = TokenSource(np.split(stream, np.cumsum(sizes)[:-1]), seq_len, 1000, keep_tail=True)
    assert len(whole) == len(parted)
    assert all(np.array_equal(whole[i], parted[i]) for i in range(len(whole)))


def test_default_corpus_is_packed_and_held_out_by_file():
    data = open_data(config(seq_len=128))
    assert data.vocab_size == 256 and data.decode(data.encode("def f(): é")) == "def f(): é"
    assert isinstance(data.encode("a"), list)
    assert data.train.tokens > 15 * data.heldout.tokens > 15 * 100_000
    assert re.fullmatch(
        r"standard library of Python [\d.]+\S*: [\d,]+ documents, [\d,]+ tokens; held out "
        r"\d+ documents, [\d,]+ tokens; bytes, vocabulary 256",
        data.description,
    )
    again = open_data(config(seq_len=64))
    assert again.fingerprint == data.fingerprint and re.fullmatch("[0-9a-f]{16}", data.fingerprint)


def test_folder_is_packed_with_separators_and_parted_by_file(tmp_path):
    write(tmp_path, {f"{i:02d}.txt": f"document {i:02d}" for i in range(40)})
    data = open_data(config(source=str(tmp_path), seq_len=10))
    streams = []
    for source in (data.train, data.heldout):
        windows = [source[i] for i in range(len(source))]
        stream = np.concatenate([windows[0][:1], *(window[1:] for window in windows)])
        streams.append(bytes(stream[stream != IGNORE].tolist()).decode())
    documents = [set(re.findall(r"document \d\d(?=\0)", stream)) for stream in streams]
    assert documents[0] and documents[1] and not documents[0] & documents[1]
    assert streams[1].count("\0") == len(documents[1]) and len(streams[1]) == 12 * len(documents[1])
    assert data.heldout.tokens + data.train.tokens == 40 * 12


def test_fingerprint_follows_the_content(tmp_path):
    files = {f"{i}.txt": f"document number {i}" for i in range(10)}
    first = write(tmp_path / "a", files)
    tokenizer = tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer)
    prints = [
        open_data(config(source=str(folder), tokenizer=name)).fingerprint
        for folder, name in (
            (first, "bytes"),
            (write(tmp_path / "moved", files), "bytes"),
            (write(tmp_path / "edited", files | {"3.txt": "document number x"}), "bytes"),
            (write(tmp_path / "renamed", {f"x{name}": text for name, text in files.items()}), "bytes"),
            (first, str(tokenizer)),
        )
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_tokenizer_json_and_its_missing_separator(tmp_path):
    write(tmp_path / "text", {f"{i}.txt": f"def x return z{i} " * 5 for i in range(10)})
    save_tokenizer(tmp_path / "with.json")
    save_tokenizer(tmp_path / "without.json", special=())
    told, untold = (
        open_data(config(source=str(tmp_path / "text"), tokenizer=str(tmp_path / name)))
        for name in ("with.json", "without.json")
    )
    assert told.vocab_size == 6 and told.train.tokens % 21 == 0 and "separator" not in told.description
    assert untold.train.tokens % 20 == 0 and "no separator between documents" in untold.description
    assert told.decode(told.encode("def x")) == "def x"


def test_eval_source_leaves_all_of_the_source_to_train_on(tmp_path):
    write(tmp_path, {"train/a.txt": "a" * 50, "train/b.txt": "b" * 50, "eval/c.txt": "c" * 30})
    both = {"source": str(tmp_path / "train"), "eval_source": str(tmp_path / "eval")}
    data = open_data(config(**both))
    assert (data.train.tokens, data.heldout.tokens) == (102, 31)
    assert f"held out 1 document of {tmp_path / 'eval'}, 31 tokens" in data.description
    with pytest.raises(UserError, match=r"data.eval_source=.* contains b.txt, which the run trains on"):
        open_data(config(**both | {"eval_source": str(tmp_path / "train" / "b.txt")}))
    with pytest.raises(UserError, match=r"data.eval_source='none' is not a file or folder"):
        open_data(config(**both | {"eval_source": "none"}))


@pytest.mark.parametrize(
    "files, seq_len, message",
    [
        ({"a.txt": "ab", "b.txt": "cd"}, 8, "has 3 tokens to train on, and a window needs data.seq_len + 1 = 9"),
        ({"a.txt": "a"}, 1, "has 0 tokens to train on, and a window needs data.seq_len + 1 = 2: give"),
        ({"train.bin": b"\1\0" * 50, "val.bin": b"\1\0"}, 8, "has 1 held-out tokens, fewer than 2"),
    ],
)
def test_too_little_data(tmp_path, files, seq_len, message):
    write(tmp_path, files)
    with pytest.raises(UserError, match=re.escape(message)):
        open_data(config(source=str(tmp_path), seq_len=seq_len))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": "int16"}, "data.dtype='int16': did you mean uint16? Else choose one of uint16, uint32"),
        ({"seq_len": 0}, "data.seq_len=0 is too small: give 1 or more"),
        ({"prefetch": -1}, "data.prefetch=-1 is too small: give 0 or more"),
        ({"workers": -2}, "data.workers=-2 is too small: give 0 or more"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        config(**changes)


def test_vocabulary_smaller_than_the_data():
    check_vocab(DATA, 93)
    with pytest.raises(UserError, match=r"to 92, and model.vocab_size is 64: set --config.model.vocab_size=93"):
        check_vocab(DATA, 64)
