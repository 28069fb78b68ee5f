"""Advice for a step that does not fit: only levers that are open, the cheapest that fits, a command to copy."""

import shlex

import pytest

from bytescope.configs import base
from bytescope.memory.records.report_record import ROWS, ReportRecord
from bytescope.memory.units import GIB
from bytescope.train.plan import advice
from bytescope.train.plan.advice import fit_command, lines, open_levers, try_levers
from bytescope.train.program.config_files import flatten, override
from bytescope.train.program.program_settings import read_settings

pytestmark = pytest.mark.quick

NOTHING_LEFT = {
    "batch.micro": "1",
    "remat.policy": "full",
    "remat.granularity": "parts",
    "optimizer.name": "adafactor",
    "precision.preset": "bf16_params",
    "optimizer.fused_backward": "true",
    "optimizer.clip": "layer",
    "data.seq_len": "1",
}


def refused(limit=10, platform="cpu", n_devices=1, rows=(), **keys):
    """The report of a step that needs 16 GiB, of which 10 are residuals, and has `limit`."""
    config = base.get_config()
    for key, text in keys.items():
        override(config, key, text)
    read_settings(config)
    rows = {
        "params": 2 * GIB,
        "optimizer": 2 * GIB,
        "gradients": GIB,
        "residuals": 10 * GIB,
        "workspace": GIB,
        **dict(rows),
    }
    size = sum(rows.values())
    return ReportRecord(
        size,
        size,
        {row: rows.get(row, 0) for row in ROWS},
        limit_bytes=limit * GIB,
        fits=False,
        verdict="exceeds",
        config=flatten(config),
        target={"platform": platform, "n_devices": n_devices},
    )


def flags(report):
    return [lever.flags for lever in open_levers(report)]


def test_only_what_is_open_is_advised():
    assert flags(refused(**NOTHING_LEFT)) == []
    left = lines(refused(**NOTHING_LEFT), [], [], "bytescope fit x")
    assert len(left) == 1 and "uses all memory savings" in left[0] and "remat" not in left[0]
    one = flags(refused(**{"batch.micro": "1", "remat.policy": "full"}))
    assert not any("batch.micro" in flag or "remat.policy" in flag or "mesh" in flag for flag in one)
    assert any("adamw_8bit" in flag for flag in one)


@pytest.mark.parametrize(
    ("keys", "n_devices", "expected"),
    [
        ({"loss.kind": "full"}, 1, "--config.loss.kind=chunked"),
        ({"model.attention": "naive"}, 1, "--config.model.attention=auto"),
        ({"remat.policy": "dots"}, 1, "--config.remat.policy=selective"),
        ({"remat.policy": "megatron"}, 1, "--config.remat.policy=full"),
        ({"remat.policy": "full"}, 1, "--config.remat.granularity=parts"),
        ({"remat.layers": "0-2:none"}, 1, "--config.remat.policy=full --config.remat.layers="),
        ({"mesh.strategy": "ddp"}, 4, "--config.mesh.strategy=zero3"),
        ({"mesh.data": "2"}, 4, "--config.mesh.data=1 --config.mesh.fsdp=4"),
        ({"data.seq_len": "16384"}, 1, "--config.model.mlp_chunk=4096"),
        ({"precision.preset": "fp32"}, 1, "--config.precision.preset=bf16"),
        ({"optimizer.fused_backward": "true", "batch.micro": "4"}, 1, "--config.batch.micro=2"),
    ],
)
def test_each_lever_is_there_where_it_is_open_and_gone_once_it_is_pulled(keys, n_devices, expected):
    before = refused(n_devices=n_devices, **keys)
    assert expected in flags(before)
    pulled = {word.split("=")[0].removeprefix("--config."): word.split("=")[1] for word in shlex.split(expected)}
    assert expected not in flags(refused(n_devices=n_devices, **{**keys, **pulled}))


def test_a_mesh_that_would_not_divide_the_latents_is_not_advised():
    latents = {"mesh.data": "2", "model.attention_kind": "mla", "model.mla_kv_rank": "64", "model.mla_q_rank": "6"}
    merged = "--config.mesh.data=1 --config.mesh.fsdp=4"
    assert merged not in flags(refused(n_devices=4, **latents))
    assert merged in flags(refused(n_devices=4, **{**latents, "model.mla_q_rank": "8"}))


def test_host_memory_only_where_there_is_some():
    assert not any("offload" in flag for flag in flags(refused()))
    assert "--config.offload.optimizer=true" in flags(refused(platform="cuda"))
    assert "--config.remat.policy=offload" in flags(refused(platform="cuda", **{"remat.policy": "full"}))
    accumulating = flags(refused(platform="cuda", **{"batch.accumulation": "2"}))
    assert not any("offload.params" in flag or "fused" in flag for flag in accumulating)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # 16 GiB, 11 of them of the batch; 6 too much: 5/11 of the micro-batch, of whose divisors 4 is the next.
        ({}, "--config.batch.micro=4 --config.batch.accumulation=4 --config.batch.mode=scan"),
        ({"batch.accumulation": "3"}, "--config.batch.micro=4 --config.batch.accumulation=12"),
        ({"batch.tokens": "8192"}, "--config.batch.micro=4"),
        ({"batch.micro": "7"}, "--config.batch.micro=1 --config.batch.accumulation=7 --config.batch.mode=scan"),
    ],
)
def test_the_micro_batch_that_may_fit_keeps_the_sequences_of_an_update(keys, expected):
    assert expected in flags(refused(**{"batch.micro": "16", **keys}))


def test_the_first_that_fits_ends_the_compiles():
    report, asked = refused(**{"batch.micro": "16"}), []

    def compiled(keys):
        asked.append(dict(keys))
        return (12 if keys.get("remat.policy") == "selective" else 9) * GIB

    told = []
    found = try_levers(report, open_levers(report), compiled, told.append)
    assert [each.bytes // GIB for each in found] == [12, 9] and len(told) == 2
    assert asked[0] == {"remat.policy": "selective"} and asked[1]["batch.micro"] == "4"
    shown = lines(report, open_levers(report), found, "bytescope fit x")
    assert shown[1] == "  12.00 GiB  2.00 GiB too much  --config.remat.policy=selective"
    assert shown[2].startswith("  9.00 GiB  fits  --config.batch.micro=4") and shown[-1].endswith("bytescope fit x")
    assert not any("not compiled" in line for line in shown)


def test_what_cannot_be_enough_is_not_compiled_and_then_all_are_together():
    """10 GiB too much, 5 of them residuals, 12 of the batch."""
    rows = {"residuals": 5 * GIB, "workspace": 5 * GIB, "logits_loss": 2 * GIB}
    report = refused(7, rows=rows, **{"batch.micro": "8", "batch.accumulation": "2"})
    asked = []
    found = try_levers(report, open_levers(report), lambda keys: asked.append(dict(keys)) or 8 * GIB)
    assert asked[-1] == {"remat.policy": "full", "batch.micro": "1", "batch.accumulation": "16"}
    assert all("selective" not in keys.get("remat.policy", "") for keys in asked)
    shown = lines(report, open_levers(report), found)
    assert "not compiled" in "".join(shown) and any("adamw_8bit" in line for line in shown)


def test_a_variant_that_cannot_run_is_left_out_and_slow_compiles_are_not_begun():
    report = refused()

    def broken(keys):
        raise ValueError("cannot\nrun")

    found = try_levers(report, open_levers(report), broken)
    assert found and all(each.bytes is None and each.why == "cannot run" for each in found)
    assert not any(line.startswith("compiled") for line in lines(report, open_levers(report), found))
    assert try_levers(report, open_levers(report), broken, each_s=advice.MAX_SECONDS + 1) == []


def test_a_first_accumulation_takes_an_accumulator():
    """As large as the parameters: halving what is smaller than that frees nothing, and is not advised."""
    rows = {"params": 8 * GIB, "residuals": 6 * GIB}
    alone, again = (refused(rows=rows, **{"batch.micro": "2", "batch.accumulation": str(steps)}) for steps in (1, 2))
    assert not any("batch.micro" in line for line in lines(alone, open_levers(alone), []))
    assert any("batch.micro=1" in line for line in lines(again, open_levers(again), []))


def test_without_a_compiler_the_levers_come_with_what_they_can_free():
    shown = lines(refused(), open_levers(refused()), [])
    assert "  10.00 GiB  may be enough  --config.remat.policy=selective" in shown
    assert any(line.startswith("  1.50 GiB  --config.optimizer.name=adamw_8bit") for line in shown)


def test_the_fit_command_keeps_the_task_and_frees_the_levers():
    report = refused(**{"batch.micro": "16", "batch.accumulation": "2"})
    given = [("batch.micro", "16"), ("batch.accumulation", "2"), ("remat.policy", "none"), ("data.source", "my texts")]
    words = shlex.split(fit_command("tiny", "h100:8", given, report))
    assert words == [
        "bytescope",
        "fit",
        "tiny",
        "h100:8",
        "--budget=9.5GiB",
        f"--batch-tokens={32 * 256}",
        "--config.data.source=my texts",
    ]
    assert shlex.split(fit_command("tiny", "local", [], report)) == ["bytescope", "fit", "tiny", "--budget=9.5GiB"]
    described = refused(platform="cuda")
    assert "--budget=10GiB" in fit_command("tiny", "h100:8", [], described)


def test_a_program_of_ones_own_has_no_advice():
    report = ReportRecord(2, 2, dict.fromkeys(ROWS, 0), limit_bytes=1, fits=False, config={"my": 1})
    assert open_levers(report) == [] and lines(report, [], []) == [] and fit_command("x", "", [], report) == ""
    assert try_levers(report, [], lambda keys: 0) == []


def test_under_adapters_the_frozen_weights_are_what_to_narrow():
    """Gradients and moments of adapters are small: nothing is said of where they lie, or of their dtypes."""
    rows = {"params": GIB // 8, "optimizer": GIB // 4, "gradients": GIB // 8, "frozen": 12 * GIB}
    report = refused(limit=9, platform="cuda", rows=rows, **{"lora.rank": "16"})
    advised = flags(report)
    assert "--config.lora.base=nf4" in advised
    assert not any(word in flag for flag in advised for word in ("adamw_8bit", "offload.", "fused", "bf16_params"))
    (lever,) = (lever for lever in open_levers(report) if "lora.base" in lever.flags)
    assert 0.7 < lever.frees["frozen"] < 0.75 and not lever.curve
    assert "--config.lora.base=nf4" not in flags(refused(platform="cuda", **{"lora.rank": "16", "lora.base": "nf4"}))
    assert not any("lora" in flag for flag in flags(refused()))
