"""The windows that are calibrated on and those that are held out."""

import argparse
import json
from types import SimpleNamespace

import numpy as np
import pytest

from bytescope.train.quantize.quantize_setup import HELD_OUT, ROWS, read_windows
from bytescope.train.user_errors import UserError

SOURCE = SimpleNamespace(
    length=64,
    tokenizer=None,
    title="a folder",
    begin=(),
    config=SimpleNamespace(model=SimpleNamespace(vocab_size=100_000)),
)


def asked(path, count, **changes):
    """Arguments for a text of so many windows of 8 tokens, each token another number."""
    path.write_text(json.dumps({"tokens": list(range(8 * count + 3))}) + "\n")
    return argparse.Namespace(**{"length": 8, "calibrate": path, "held_out": None, "samples": 64, **changes})


@pytest.mark.parametrize("count, calibration, held_out", [(2, 1, 1), (9, 6, 2), (40, 28, 8), (400, 64, 32)])
def test_the_end_of_a_text_is_held_out(tmp_path, count, calibration, held_out):
    found, held = read_windows(asked(tmp_path / "text.jsonl", count), SOURCE)
    assert found.dtype == held.dtype == np.int32
    assert (len(found), len(held)) == (calibration, held_out) and held_out <= HELD_OUT
    rows = min(ROWS, len(found), len(held))
    assert len(found) % rows == len(held) % rows == 0
    assert found.max() < held.min()  # nothing of it is calibrated on
    assert (np.diff(found, axis=1) == 1).all() and (found[:, 0] % 8 == 0).all()
    if count == 400:
        assert found[0, 0] == 0 and found[-1, 0] >= 8 * 360  # over the whole text


def test_a_text_of_its_own_is_held_out_whole(tmp_path):
    args = asked(tmp_path / "held.jsonl", 12)
    args = asked(tmp_path / "text.jsonl", 8, held_out=args.calibrate)
    found, held = read_windows(args, SOURCE)
    assert len(found) == 8 and len(held) == 12


def test_what_is_too_short_is_refused(tmp_path):
    with pytest.raises(UserError, match="has 1 windows of 8 tokens, and at least 2 are needed"):
        read_windows(asked(tmp_path / "text.jsonl", 1), SOURCE)


def test_windows_are_no_longer_than_the_model_takes(tmp_path):
    found, held = read_windows(asked(tmp_path / "text.jsonl", 40, length=512), SOURCE)
    assert found.shape[1] == held.shape[1] == 64
