"""`remat.policy=auto` in real programs: the arithmetic of `none`, within its budget, refused in a line, agreed on."""

import json

import jax
import numpy as np
import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.cost import roofline
from bytescope.memory.devices import targets
from bytescope.memory.remat.remat_problem import RecomputeRates
from bytescope.memory.remat.remat_solver import pattern_keeping
from bytescope.memory.seconds import rates
from bytescope.model.remat.policies import POLICIES
from bytescope.train.plan.block_description import describe_block
from bytescope.train.plan.remat_auto import NOMINAL, figures_of, settle, settled_program
from bytescope.train.program.program_settings import read_settings
from bytescope.train.user_errors import DoesNotFit
from support.command_line import train as main
from support.described import WIDE_GPU, compile_described
from support.exhaustive import exhaustive
from support.toy import run_losses, small_config, small_program

KEYS = {"model.n_layers": 4, "model.attention": "naive", "batch.micro": 32}


def allocated(overrides, devices=1):
    return report_of(small_program(overrides, devices).compile_for_report()).allocated_bytes


def between(overrides, share, devices=1):
    """A budget between what `full` and `none` allocate, in bytes as a key has it."""
    low, high = (allocated({**overrides, "remat.policy": policy}, devices) for policy in ("full", "none"))
    assert low < 0.8 * high
    return str(round(low + share * (high - low)))


@pytest.fixture(scope="module")
def plain():
    return run_losses(small_program({**KEYS, "remat.policy": "none"}), 3)


@pytest.mark.quick
def test_a_cpus_plans_are_ranked_by_a_file_of_rates_alone(tmp_path, monkeypatch):
    """Rates that each process measured for itself would differ; those of a file do not."""
    target = targets.parse("cpu:2")
    assert figures_of(target) is NOMINAL
    monkeypatch.setattr("bytescope.memory.cost.roofline.machine_rates", lambda: (2e11, 4e10))
    (file := tmp_path / "rates.json").write_text(
        json.dumps(rates.select({**target.to_json(), "n_devices": 1}).to_json())
    )
    rates.use(file)
    found = figures_of(target)
    rates.use(None)
    assert (found.flops_per_s("fp32"), found.hbm_bytes_per_s) == (1e11, 2e10) and figures_of(target) is NOMINAL


def test_losses_equal_none_within_the_budget(plain):
    told, budget = [], between(KEYS, 0.2)
    config = small_config({**KEYS, "remat.policy": "auto", "remat.budget": budget, "remat.cost": "flops"})
    program = settled_program(config, jax.devices()[:1], told.append)
    assert program.config.remat.policy == "full" and program.config.remat.layers
    assert config.remat.policy == "auto"  # the caller's is left alone
    assert program.decided.startswith("auto: ") and f"{len(told)} programs compiled" in program.decided
    assert told[0].startswith("auto: 4 x full: ")
    report = report_of(program.compile_for_report())
    assert report.allocated_bytes <= int(budget) and sum(report.work["recompute"]["flops"].values()) > 0
    np.testing.assert_allclose(run_losses(program, 3), plain, rtol=1e-5)


@pytest.mark.exhaustive
def test_a_mixture_is_planned_within_its_budget():
    """Rows of experts, multiplied tile by tile in a loop of their own."""
    keys = {"model.n_layers": 2, "model.experts": 4, "model.d_expert": 32, "batch.micro": 32}
    budget = round(1.15 * allocated({**keys, "remat.policy": "full"}))
    config = small_config({**keys, "remat.policy": "auto", "remat.budget": str(budget), "remat.cost": "flops"})
    report = report_of(settled_program(config, jax.devices()[:1]).compile_for_report())
    assert report.allocated_bytes <= budget and report.work["recompute"]["flops"]


@pytest.mark.exhaustive
def test_stages_are_planned_alike_within_their_budget():
    """One pattern for all layers, of which each stage holds what its schedule says; the model knows how much."""
    keys = {
        "model.n_layers": 5,
        "model.attention": "naive",
        "batch.micro": 8,
        "mesh.stage": 2,
        "mesh.fsdp": 1,
        "batch.mode": "scan",
        "batch.accumulation": 2,
        "remat.cost": "flops",
    }
    config = small_config({**keys, "remat.policy": "auto", "remat.budget": between(keys, 0.4, 2)})
    program = settled_program(config, jax.devices()[:2])
    report = report_of(program.compile_for_report())
    assert program.decided.startswith("auto: 5 x ") and "," not in program.decided.partition(";")[0]
    assert report.work["recompute"]["flops"] and report.allocated_bytes <= int(config.remat.budget)
    block = describe_block(program)
    kept = pattern_keeping(
        block, RecomputeRates(dict.fromkeys(roofline.UNITS, 1.0), 1.0), "", POLICIES["minimal"].names
    )
    slots = report_of(small_program({**keys, "remat.policy": "minimal"}, 2).compile_for_report()).breakdown["residuals"]
    assert kept.bytes * block.layers == pytest.approx(slots, rel=0.02)


@pytest.mark.exhaustive
def test_unrolled_layers_with_room_make_nothing_again():
    """The graph is that of a loop over the layers; the program has none."""
    keys = {**KEYS, "model.n_layers": 2, "model.scan": False, "remat.policy": "auto", "remat.cost": "flops"}
    program = settled_program(small_config(keys), jax.devices()[:1])
    assert report_of(program.compile_for_report()).work["recompute"]["flops"] == {}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"remat.budget": "0"}, "remat.budget=0 is out of range: a device has"),
        ({"remat.budget": "-3GiB"}, "remat.budget: '-3GiB' is not a valid size"),
        ({"remat.budget": "x"}, "'x' is not a valid size"),
        *exhaustive(({"remat.budget": "9000TiB"}, "remat.budget=9000TiB is out of range: a device has")),
        ({"remat.cost": "dollars"}, "remat.cost"),
        ({"remat.granularity": "parts"}, "set remat.granularity=block"),
        ({"remat.layers": "0-1:full"}, "remat.layers=0-1:full cannot be combined with remat.policy=auto"),
    ],
)
def test_a_budget_that_is_none_is_one_line(keys, message, capsys):
    words = ["--config.train.cache_dir=none", *(f"--config.{key}={value}" for key, value in keys.items())]
    assert main(["tiny", "--config.remat.policy=auto", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_budget_below_full_is_three(capsys, tmp_path):
    words = [
        "tiny",
        "--config.model.n_layers=2",
        "--config.remat.policy=auto",
        "--config.remat.budget=2MiB",
        "--config.train.cache_dir=none",
        f"--workdir={tmp_path / 'run'}",
    ]
    assert main(words) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: remat.policy=auto: the smallest plan (2 x full) takes ")
    assert "more than the budget of 2.00 MiB" in error.splitlines()[0] and not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_run_tells_its_plan(capsys, tmp_path):
    """That a run resumes under another policy is tried in tests/end_to_end/test_survival.py."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"to be or not to be, that is question {number}. " * 400)
    words = [
        "tiny",
        f"--workdir={tmp_path / 'run'}",
        f"--config.data.source={tmp_path / 'text'}",
        "--config.model.d_model=32",
        "--config.model.n_layers=2",
        "--config.model.d_ff=64",
        "--config.model.n_heads=2",
        "--config.model.n_kv_heads=1",
        "--config.model.d_head=16",
        "--config.mesh.fsdp=-1",
        "--config.data.seq_len=32",
        "--config.train.sample_tokens=0",
        "--config.train.cache_dir=none",
        "--config.train.eval_sequences=8",
        "--config.remat.policy=auto",
        "--verbose",
    ]
    assert main([*words, "--config.train.steps=1"]) == 0
    out = capsys.readouterr().out
    assert "auto: 2 x full: " in out and "programs" in out.split("devices", 1)[1]


@pytest.mark.exhaustive
def test_ranges_copy_no_parameters():
    """Two ranges under one policy hold what one does; split stacks would be a copy of all layers' parameters."""
    shape = {**WIDE_GPU, "batch.micro": 1, "model.d_ff": 4096, "data.seq_len": 256, "remat.policy": "full"}
    ranges = ("()", "(0-2:full,2-4:full)")
    one, two = (compile_described("h100", {**shape, "remat.layers": layers}) for layers in ranges)
    copied = 4 * (2 * 512 * 512 + 2 * 512 * 512 + 3 * 512 * 4096) * 2  # bytes of all layers' matrices in bfloat16
    assert two.stats.temp_bytes - one.stats.temp_bytes < copied / 4


def test_the_first_process_decides():
    """Its memory is the limit and its plan the one that all take, whatever another would find."""
    config = small_config({"remat.policy": "auto"})
    plan = {"remat.policy": "full", "remat.layers": "(0-1:up,1-3:full)"}
    for answer in ((plan, "as the first has it"), None):
        answers = ["auto", 10**5, answer]

        def first(value, answers=answers):
            return answers.pop(0)

        if answer is None:
            with pytest.raises(DoesNotFit, match="remat.policy=auto") as refused:
                settle(read_settings(config), jax.devices()[:1], lambda line: None, first)
            assert "batch.micro=" in "".join(refused.value.advice)
            assert "remat.policy" not in "".join(refused.value.advice)
        else:
            taken, line = settle(read_settings(config), jax.devices()[:1], lambda line: None, first)
            assert taken.remat.layers == ("0-1:up", "1-3:full") and line == answer[1]
        assert not answers
    with pytest.raises(ValueError, match="remat.policy=auto differs from process 0, which has none"):
        settled_program(config, jax.devices()[:1], agree=lambda value: "none")
