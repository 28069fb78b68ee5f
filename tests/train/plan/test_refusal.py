"""A step that does not fit: the run's own program is compiled with one lever more, and the fit command is there."""

import dataclasses

import jax
import pytest

from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import GIB
from bytescope.train.launch.failures import explained
from bytescope.train.plan import refusal
from bytescope.train.plan.advice import combine_levers, open_levers
from bytescope.train.plan.remat_auto import with_keys
from bytescope.train.program.checks import check
from bytescope.train.program.program import build
from bytescope.train.program.program_settings import read_settings
from bytescope.train.program.run_command import Command
from bytescope.train.user_errors import DoesNotFit
from support.command_line import train as main
from support.described import described
from support.toy import small_config, small_program

pytestmark = pytest.mark.quick

COMMAND = Command("tiny", (("batch.micro", "8"), ("data.source", "my texts")))


@pytest.fixture
def compiled(monkeypatch):
    """Sizes of variants by policy; the keys of what was compiled."""
    seen = []

    def build(config, devices):
        seen.append((config.remat.policy, config.batch.micro, config.batch.accumulation))
        return small_program({"remat.policy": config.remat.policy})

    sizes = {"selective": 3 * GIB}
    monkeypatch.setattr(refusal, "build", build)
    monkeypatch.setattr(type(small_program()), "compile_for_report", lambda self: self.config.remat.policy)
    monkeypatch.setattr(refusal, "report_of", lambda policy, **_: ReportRecord(0, sizes.get(policy, GIB), {}))
    return seen


def report(program, **rows):
    rows = {"residuals": 3 * GIB, "params": GIB, **rows}
    size = sum(rows.values())
    return dataclasses.replace(
        refusal.report_without_compiling(program),
        peak_bytes=size,
        allocated_bytes=size,
        breakdown=rows,
        limit_bytes=2 * GIB,
        fits=False,
    )


def test_the_cheapest_change_that_fits_is_found_by_compiling(compiled):
    program = small_program({"remat.policy": "none", "batch.accumulation": 2})
    told = []
    with pytest.raises(DoesNotFit) as refused:
        refusal.refuse(report(program), program, COMMAND, told.append)
    assert compiled == [("selective", 8, 2), ("none", 2, 8)] and len(told) == 2
    assert str(refused.value).endswith("2.00 GiB too much") and refused.value.exit_code == 3
    advice = "\n".join(refused.value.advice)
    assert "3.00 GiB  1.00 GiB too much  --config.remat.policy=selective" in advice
    assert "1.00 GiB  fits  --config.batch.micro=2 --config.batch.accumulation=8" in advice
    assert f"bytescope fit tiny --budget=1.9GiB --batch-tokens={16 * 32} '--config.data.source=my texts'" in advice


def test_nothing_is_compiled_without_host_memory_for_it(compiled, monkeypatch):
    monkeypatch.setattr(refusal, "free_host_bytes", lambda: 200 * 2**20)
    program = small_program({"remat.policy": "none"})
    with pytest.raises(DoesNotFit) as refused:
        refusal.refuse(report(program), program, COMMAND)
    assert compiled == [] and any("may be enough" in line for line in refused.value.advice)


def test_a_device_that_ran_out_of_memory_is_told_what_is_left(compiled):
    program = small_program({"remat.policy": "full", "batch.micro": 1})
    lines = refusal.advice_without_compiling(report(program, optimizer=GIB), COMMAND)
    with pytest.raises(DoesNotFit) as raised, explained(report(program), jax.devices()[0], lambda: lines):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    advice = "\n".join(raised.value.advice)
    assert compiled == [] and "adamw_8bit" in advice and "batch.micro" not in advice and "remat.policy" not in advice
    assert "GiB" not in refusal.advice_without_compiling(refusal.report_without_compiling(program), COMMAND)[1]


def test_advice_stands_below_the_line(monkeypatch, capsys):
    def refuse(*_):
        raise DoesNotFit("too much", ["compiled:", "  --config.remat.policy=full"])

    monkeypatch.setattr("bytescope.train.commands.train_command.run", refuse)
    assert main([]) == 3
    assert capsys.readouterr().err == "error: too much\ncompiled:\n  --config.remat.policy=full\n"
    assert small_config().remat.policy  # the toy's own


@pytest.mark.parametrize(
    "keys",
    [
        {
            "remat.policy": "none",
            "loss.kind": "full",
            "model.attention": "naive",
            "mesh.strategy": "zero1",
            "mesh.data": 2,
        },
        {"mesh.strategy": "ddp", "batch.accumulation": 4, "batch.mode": "scan", "precision.preset": "fp16"},
        {"remat.policy": "custom", "remat.save": "q,k"},
        {"optimizer.fused_backward": "true", "optimizer.clip": "layer", "remat.layers": "0-1:none", "mesh.tensor": 2},
        {"batch.tokens": 8192, "model.scan": "false", "remat.policy": "full", "mesh.context": 2},
        {"remat.policy": "sqrt", "optimizer.name": "muon", "precision.preset": "bf16"},
    ],
    ids=str,
)
def test_every_lever_that_is_advised_can_be_pulled(keys):
    """On GPUs, which have host memory; all that keep the curve also together."""
    devices = described("h200:4")
    program = build(small_config(keys), devices)
    found = dataclasses.replace(report(program), target={"platform": "cuda", "n_devices": 4})
    levers = open_levers(found)
    assert levers
    for lever in (*levers, *filter(None, [combine_levers(levers, found)])):
        config = with_keys(program.config, dict(lever.keys))
        # The trace shows what an update layer by layer cannot be combined with.
        traced = any(key.startswith(("off", "opt")) for key in lever.keys)
        pulled = build(config, devices) if traced else check(read_settings(config), devices)
        if lever.curve:
            assert pulled.batch.tokens == program.batch.tokens, lever.flags
