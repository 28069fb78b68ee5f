"""The windows of the calibration text."""

import argparse
import json
from types import SimpleNamespace

import numpy as np
import pytest

from bytescope.train.quantize.quantize_setup import read_windows

SOURCE = SimpleNamespace(
    length=64,
    tokenizer=None,
    title="a folder",
    begin=(),
    config=SimpleNamespace(model=SimpleNamespace(vocab_size=100_000)),
)


# (Windows of 8 tokens in the text, --length, windows that are used, tokens of each): at most 64, a multiple of 4.
@pytest.mark.parametrize(
    "count, length, used, tokens", [(1, 8, 1, 8), (3, 8, 3, 8), (9, 8, 8, 8), (400, 8, 64, 8), (40, 512, 4, 64)]
)
def test_windows_are_spread_over_the_text_and_no_longer_than_the_model_takes(tmp_path, count, length, used, tokens):
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"tokens": list(range(8 * count + 3))}) + "\n")
    found = read_windows(argparse.Namespace(length=length, calibrate=path, samples=64), SOURCE)
    assert found.dtype == np.int32 and found.shape == (used, tokens)
    assert (np.diff(found, axis=1) == 1).all() and (found[:, 0] % 8 == 0).all()
    assert found[0, 0] == 0 and found[-1, -1] >= 0.7 * 8 * count
