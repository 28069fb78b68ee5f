"""The global batch: its tokens give the accumulation."""

import jax
import pytest

from bytescope.memory import __main__ as command
from bytescope.train.data.batch_algebra import BatchAlgebra
from bytescope.train.plan.config_facts import accumulation
from bytescope.train.program.config_files import flatten
from bytescope.train.program.program import build
from support.toy import small_config


def batch_of(devices=8, **keys):
    config = small_config({f"batch.{key}": value for key, value in keys.items()})
    return build(config, jax.devices()[:devices]).batch


def test_four_million_tokens():
    """4,000,000 = 4,000 tokens a device x 8 devices x 125 accumulation steps."""
    config = small_config({"batch.micro": 1, "batch.tokens": 4_000_000}).batch
    batch = BatchAlgebra.from_config(config, 8, 4000)
    assert (batch.accumulation, batch.tokens, batch.rows) == (125, 4_000_000, 8)
    assert str(batch) == (
        "1 micro-batch x 125 accumulation x 8 data-parallel = 1,000 sequences of 4,000 = 4,000,000 tokens per update"
    )


def test_the_program_accumulates_what_the_tokens_ask_for():
    program = build(small_config({"batch.micro": 2, "batch.tokens": 2048}), jax.devices()[:8])
    assert program.batch == batch_of(micro=2, accumulation=4)
    assert program.calls_per_update == 4 and type(program.state.opt_state).__name__ == "MultiStepsState"
    scanned = build(small_config({"batch.micro": 2, "batch.tokens": 2048, "batch.mode": "scan"}), jax.devices()[:8])
    assert scanned.batch_shapes["inputs"].shape == (4, 16, 32)
    assert accumulation(flatten(scanned.config), 8) == 4 == accumulation({"batch.accumulation": 4}, 8)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"micro": 2, "tokens": 2000},
            "batch.tokens=2000 is not a multiple of 512 tokens, .* nearest multiples are 1536 and 2048",
        ),
        ({"micro": 2, "tokens": 100}, "nearest multiples are 512$"),
        (
            {"micro": 2, "tokens": 2048, "accumulation": 4},
            "batch.tokens=2048 and batch.accumulation=4 cannot be combined: set only one",
        ),
        ({"micro": 2, "tokens": -1}, "batch.tokens=-1 is too small: give 0 or more"),
    ],
)
def test_a_batch_that_cannot_be(keys, message):
    with pytest.raises(ValueError, match=message):
        batch_of(**keys)


def test_the_report_shows_the_algebra(capsys):
    words = ["report", "tiny", "cpu:1", "--config.model.n_layers=1", "--config.batch.tokens=4096"]
    assert command.main(words) == 0
    assert "16 micro-batch x 2 accumulation x 1 data-parallel = 32 sequences" in capsys.readouterr().out
    assert command.main([*words[:-1], "--config.batch.tokens=4097"]) == 2
    assert "nearest multiples are 4096 and 6144" in capsys.readouterr().err
