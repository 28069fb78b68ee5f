"""The pool of pages: what the limit leaves, to the byte, and how many sequences it holds."""

import argparse

import jax
import pytest

from bytescope.memory import cli
from bytescope.memory.records.result import plain
from bytescope.train.generate import generate_flags, open_engine
from bytescope.train.generate.budget import SLACK, GenerationMemory, lengths_of, settle
from bytescope.train.generate.model_source import DTYPES, UNQUANTIZED, describe_model
from bytescope.train.program.config_files import load
from bytescope.train.user_errors import DoesNotFit
from support.json_results import read_result

GIB = 2**30


def budget(**changes):
    made = {
        "limit": 64 * GIB,
        "weights": 16 * GIB,
        "steps": {"one token each": 100, "prompts": 300},
        "page_bytes": 2**21,
        "page": 16,
        "pages": 1001,
        "sequences": 64,
        "length": 8192,
    }
    return GenerationMemory(**{**made, **changes})


@pytest.mark.quick
def test_figures():
    found = budget()
    assert found.pool_bytes == 1001 * 2**21 and found.step == 300 and found.peak_bytes == 16 * GIB + 1001 * 2**21 + 300
    assert found.positions == 16_000 and found.token_bytes == 2**17 and found.left == found.limit - found.peak_bytes
    assert [found.at_once(length) for length in (1, 16, 17, 160, 16_000, 16_001)] == [1000, 1000, 500, 100, 1, 0]
    assert plain(found)["sequences_of_length"]["8192"] == 1
    assert lengths_of(1000) == [256, 512, 1000] and lengths_of(100) == [100]


@pytest.mark.quick
def test_flags_name_what_there_is():
    assert set(generate_flags.DTYPES) == set(DTYPES)


@pytest.mark.quick
@pytest.mark.parametrize("step", [10, 10**6, 5 * 10**8, lambda pages: 10**8 + 40_000 * pages])
@pytest.mark.parametrize("most", [50, 10**9])
def test_the_pool_fits_and_little_is_left(step, most):
    limit, weights, page = 64 * 10**9, 16 * 10**9, 2 * 10**6
    asked = []

    def measure(pages):
        asked.append(pages)
        return {"a": 7, "b": step(pages) if callable(step) else step}

    pages, steps = settle(limit, weights, page, most, measure)
    left = limit - weights - pages * page - max(steps.values())
    assert left >= 0 and pages == asked[-1] <= most and len(asked) <= 4
    assert pages == most or left <= 4 * SLACK * limit


@pytest.mark.quick
@pytest.mark.parametrize(
    ("longest", "chunk"),
    [(256, 256), (300, 288), (8, 16), (4096, 512)],
)
def test_a_step_has_no_more_positions_than_the_model(longest, chunk):
    args = argparse.Namespace(length=None, sequences=None)
    assert open_engine.sizes_of(args, "gpu", longest, longest, None).chunk == chunk


@pytest.mark.quick
def test_layers_that_a_config_unrolls_in_a_loop_are_described():
    """Generation has no loop over layers: gpt2_small unrolls twelve of them."""
    config = load("gpt2_small", [("model.d_model", "64"), ("model.n_heads", "4"), ("model.n_kv_heads", "4")])
    model = describe_model(config, jax.devices()[:1], 1, 1, "", UNQUANTIZED).config
    assert config.model.unroll == 12 and (model.scan, model.unroll) == (False, 1)


@pytest.mark.quick
def test_no_room_is_told_before_anything_is_compiled():
    with pytest.raises(DoesNotFit, match="for a page of keys and values") as found:
        settle(10**9, 10**9, 10**6, 100, lambda pages: pytest.fail("compiled"))
    assert found.value.exit_code == 3
    with pytest.raises(DoesNotFit):
        settle(10**9, 5 * 10**8, 10**6, 100, lambda pages: {"a": 6 * 10**8})


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["report", "tiny", "cpu:4", "--generate", "--length=256", "--sequences=8"]
    assert cli.main([*command, "--tensor=2", "--json=two.json"]) == 0
    out = capsys.readouterr().out
    assert "weights" in out and "sharded over fsdp 1 x tensor 2" in out
    assert cli.main([*command, "--kv=int8", "--json=narrow.json"]) == 0
    two, narrow = (read_result(tmp_path / f"{name}.json") for name in ("two", "narrow"))
    assert two["weights"] < narrow["weights"] and two["pages"] == narrow["pages"] == 8 * 16 + 1
    report = two["reports"]["one token each"]
    assert report["breakdown"]["params"] == two["weights"] and report["breakdown"]["cache"] == two["pool_bytes"]
    assert report["predicted_bytes"] == two["weights"] + two["pool_bytes"] + two["steps"]["one token each"]
    # Of 8 bits and a scale for each head of a token, beside four bytes: d_head is 32.
    assert narrow["token_bytes"] / (2 * two["token_bytes"]) == (32 + 4) / (4 * 32)
    assert cli.main([*command, "--html=two.html"]) == 2
    assert "--html" in capsys.readouterr().err
