"""Rows of examples: what goes where, in which order, and what is learned."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.data.batches import Data, heldout_batches, train_batches
from bytescope.train.data.packing import ExampleSource, pack
from bytescope.train.data.tokenizer import ByteTokenizer
from support.text_data import config

pytestmark = pytest.mark.quick

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=60)


def source(lengths, seq_len=12, packing=True, learned=None, chosen=None):
    """Examples of so many positions; the tokens of all are numbered from 1 on."""
    starts = np.cumsum([0, *(np.array(lengths) + 1)])
    tokens = np.arange(1, starts[-1] + 1, dtype=np.uint32)
    learned = np.ones(len(tokens), bool) if learned is None else learned
    chosen = np.arange(len(lengths)) if chosen is None else np.array(chosen)
    return ExampleSource(tokens, learned, starts, chosen, seq_len=seq_len, packing=packing, vocab_size=10_000)


def examples_in(batch):
    """The tokens of each segment, its last target included; checks padding and segments on the way."""
    found = []
    for inputs, targets, segments in zip(batch["inputs"], batch["targets"], batch["segments"], strict=True):
        used = int((segments > 0).sum())
        assert not inputs[used:].any() and (targets[used:] == IGNORE).all() and not segments[used:].any()
        assert (np.diff(segments[:used]) >= 0).all() and set(segments[:used]) == set(range(1, segments.max() + 1))
        for segment in range(1, int(segments.max()) + 1):
            place = segments == segment
            assert (inputs[place][1:] == targets[place][:-1]).all()
            found.append([*inputs[place].tolist(), int(targets[place][-1])])
    return found


@given(LENGTHS)
def test_rows_hold_every_example_once_and_are_full(lengths):
    rows = pack(np.array(lengths), 12)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= 12 and sorted(set(rows)) == list(range(len(filled)))
    # No two rows would go into one, so that at most one is less than half full.
    assert len(filled) < 2 or np.partition(filled, 1)[:2].sum() > 12


def test_best_fit_takes_the_fullest_row_that_has_room():
    assert pack(np.array([3, 9, 7, 5, 5, 3]), 12).tolist() == [0, 0, 1, 1, 2, 2]


@given(LENGTHS)
def test_rows_give_the_examples_back(lengths):
    packed = source(lengths)
    found = examples_in(packed.batch(range(len(packed))))
    starts = np.cumsum([0, *(np.array(lengths) + 1)])
    assert sorted(found) == [list(range(a + 1, b + 1)) for a, b in pairwise(starts)]
    assert (packed.examples, packed.tokens, packed.learned) == (len(lengths), sum(lengths) + len(lengths), sum(lengths))
    assert packed.filled == sum(lengths) / (12 * len(packed))


def test_only_what_is_learned_is_a_target():
    learned = np.array([0, 1, 0, 1, 1, 1, 0, 1], bool)  # a first token has nothing before it
    packed = source([3, 3], seq_len=7, learned=learned)
    assert packed[0]["inputs"].tolist() == [1, 2, 3, 5, 6, 7, 0]
    assert packed[0]["targets"].tolist() == [2, IGNORE, 4, 6, IGNORE, 8, IGNORE]
    assert packed[0]["segments"].tolist() == [1, 1, 1, 2, 2, 2, 0] and packed.learned == 4
    apart = source([3, 3], seq_len=7, learned=learned, packing=False)
    assert len(apart) == 2 and apart[1].keys() == {"inputs", "targets"}
    assert apart[1]["targets"].tolist() == [6, IGNORE, 8, *[IGNORE] * 4]
    assert apart.batch([1, 0, 5])["mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0]] * 2 + [[0] * 7]
    assert apart.batch([0, 1], stop=1)["mask"].sum(-1).tolist() == [3, 0]
    assert source([3, 3], chosen=[1])[0]["inputs"].tolist()[:3] == [5, 6, 7]


LONG = source(np.random.default_rng(0).integers(1, 13, 100))
DATA = Data(LONG, source([3, 12, 5, 9]), 10_000, "", "", ByteTokenizer())
ROWS = len(LONG)


def read(position, count, rows=1):
    batches = train_batches(DATA, rows=rows, seed=0, position=position, config=config(seq_len=12))
    taken = [next(batches) for _ in range(-(-count // rows))]
    batches.close()
    return {name: np.concatenate([batch[name] for batch in taken])[:count] for name in taken[0]}


def test_every_epoch_visits_every_example_once_in_an_order_of_its_own():
    stream, orders = read(0, 2 * ROWS), []
    for epoch in range(2):
        part = {name: array[epoch * ROWS : (epoch + 1) * ROWS] for name, array in stream.items()}
        orders.append([example[0] for example in examples_in(part)])
        assert len(set(orders[-1])) == 100
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert all(array.dtype == np.int32 and array.shape == (2 * ROWS, 12) for array in stream.values())


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2 * ROWS), st.integers(1, 5))
def test_a_restart_anywhere_continues_the_rows(position, rows):
    stream = read(0, 2 * ROWS + 6)
    again = read(position, 6, rows)
    assert all(np.array_equal(again[name], array[position : position + 6]) for name, array in stream.items())


def test_held_out_examples_are_padded_to_whole_batches():
    batches = list(heldout_batches(DATA, rows=4))
    assert len(batches) == 1 and sorted(len(example) for example in examples_in(batches[0])) == [4, 6, 10, 13]
    assert not batches[0]["segments"][3].any() and (batches[0]["targets"][3] == IGNORE).all()
    (first,) = heldout_batches(DATA, rows=4, sequences=1)
    assert (first["segments"].any(axis=1)).tolist() == [True, False, False, False]
