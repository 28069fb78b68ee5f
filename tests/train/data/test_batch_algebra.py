"""The global batch: from one flag, by a schedule, and the learning rate that follows it."""

import itertools
import json
import shutil

import jax
import numpy as np
import pytest

from bytescope.memory import __main__ as command
from bytescope.memory.view.console import make_console
from bytescope.train.data.batch_algebra import BatchAlgebra
from bytescope.train.plan.config_facts import accumulation
from bytescope.train.program.config_files import flatten
from bytescope.train.program.program import build
from bytescope.train.run.feed import feed
from bytescope.train.run.loop import run
from bytescope.train.step.optimizer.rules import describe_scaling, make_schedule
from support.toy import first_state, fixed_batches, small_config


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


# ---- an accumulation that changes -------------------------------------------------------------------

SCHEDULE = {"batch.accumulation_schedule": "0:1,4:2,9:4"}
COUNTS = [1] * 4 + [2] * 5 + [4] * 11


def test_the_schedule_counts_updates_tokens_and_sequences():
    batch = batch_of(devices=2, micro=4, accumulation_schedule="0:1,4:2,9:4")
    assert [batch.at(update) for update in range(20)] == COUNTS
    assert [int(batch.traced_at(jax.numpy.int32(update))) for update in range(20)] == COUNTS
    assert [batch.rows_before(update) for update in range(20)] == [8 * sum(COUNTS[:n]) for n in range(20)]
    assert batch.tokens_at(3) == 8 * 32 and batch.tokens == batch.tokens_at(19) == 4 * 8 * 32
    assert batch_of(micro=4, accumulation=3).rows_before(5) == 5 * 3 * 32
    assert str(batch) == (
        "4 micro-batch x accumulation 1 from update 0, 2 from update 4, 4 from update 9 x 2 "
        "data-parallel, sequences of 32 = 256 to 1,024 tokens per update"
    )
    assert accumulation({"batch.accumulation_schedule": ("0:1", "4:2")}, 8) == 2


def test_every_update_is_that_of_one_batch_of_its_size():
    """The curve of a schedule, its learning rate scaled along, is that of plain steps of 4, 8 and 16 sequences."""
    scaling = {"optimizer.batch_scaling": "sqrt", "optimizer.base_batch_tokens": 256}
    plain = {n: build(small_config({"batch.micro": 4 * n, **scaling}), jax.devices()[:1]) for n in (1, 2, 4)}
    program = build(small_config({"batch.micro": 4, **SCHEDULE, **scaling}), jax.devices()[:1])
    hosts = iter(fixed_batches(4, 32, 64, sum(COUNTS)))
    host_again = iter(fixed_batches(4, 32, 64, sum(COUNTS)))
    state, losses, rates = first_state(program), [], []
    for calls in itertools.islice(feed(program, hosts), 20):
        for batch in calls:
            state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
        rates.append(float(metrics["lr"]))
    assert int(state.step) == 20 and next(hosts, None) is None
    other, expected = first_state(plain[1]), []
    for update, count in enumerate(COUNTS):
        read = [next(host_again) for _ in range(count)]
        batch = {name: np.concatenate([one[name] for one in read]) for name in read[0]}
        other, metrics = plain[count].step(other, batch)
        expected.append(float(metrics["loss"]))
        assert rates[update] == pytest.approx(float(metrics["lr"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.exhaustive
def test_a_run_resumed_within_a_schedule_goes_on_with_its_curve(tmp_path):
    """Stopped after 5 of 8 updates, between two changes; batches, tokens and positions are those of the whole run."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.py").write_text(f"x = {number}\n" * 8_000)
    config = small_config(
        {
            "batch.accumulation_schedule": "0:1,2:2,6:4",
            "batch.micro": 1,
            "train.steps": 8,
            "model.vocab_size": 256,
            "model.n_layers": 1,
            "train.log_every": 1,
            "train.eval_every": 0,
            "train.checkpoint_every": 5,
            "train.keep": 9,
            "data.source": text,
            "data.prefetch": 2,
            "train.sample_tokens": 0,
            "train.cache_dir": "none",
        }
    )

    def rows(place):
        run(config, workdir=place, extend=False, console=make_console(quiet=True))
        return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]

    whole = rows(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "8")
    (tmp_path / "cut" / "metrics.jsonl").write_text("")
    again = rows(tmp_path / "cut")
    kept = ("step", "loss", "grad_norm", "lr", "batch_tokens")
    strip = lambda found: [{key: row[key] for key in kept} for row in found if "loss" in row]  # noqa: E731
    assert [row["step"] for row in strip(again)] == [6, 7, 8]
    assert strip(again) == strip(whole)[5:]
    assert [row["batch_tokens"] for row in strip(whole)] == [32 * 8 * n for n in [1] * 2 + [2] * 4 + [4] * 2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"accumulation_schedule": "0:1,4:2", "accumulation": 2},
            "batch.accumulation=2 cannot be combined: set only one of them",
        ),
        ({"accumulation_schedule": "0:1,4:2", "mode": "scan"}, "with batch.mode=scan, which compiles a fixed number"),
        (
            {"accumulation_schedule": "1:2"},
            "accumulation_schedule=1:2 is not a valid schedule: write UPDATE:ACCUMULATION",
        ),
        ({"accumulation_schedule": "0:1,0:2"}, "in order"),
        ({"accumulation_schedule": "0:0"}, "in order"),
        ({"accumulation_schedule": "0-4"}, "write UPDATE:ACCUMULATION"),
    ],
)
def test_a_schedule_that_is_none(keys, message):
    with pytest.raises(ValueError, match=message):
        batch_of(**keys)


# ---- the learning rate of a batch -------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_the_learning_rate_is_scaled_when_asked_to(kind, factor):
    config = small_config({"optimizer.batch_scaling": kind, "optimizer.base_batch_tokens": 256, "batch.micro": 32})
    program = build(config, jax.devices()[:1])
    plain = make_schedule(config.optimizer, 20)
    for step in (0, 5, 19):
        assert float(program.parts.schedule(step)) == pytest.approx(factor * float(plain(step)))
    told = describe_scaling(config.optimizer, program.batch)
    assert told == ("" if kind == "none" else f"0.01 x {factor:g} = {0.01 * factor:g} ({kind}, 1,024 / 256 tokens)")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optimizer.batch_scaling": "linear"}, "base_batch_tokens=0: give the tokens"),
        ({"optimizer.batch_scaling": "cubic"}, "choose one of none, sqrt, linear"),
    ],
)
def test_a_scaling_that_cannot_be(keys, message):
    with pytest.raises(ValueError, match=message):
        build(small_config(keys), jax.devices()[:1])
