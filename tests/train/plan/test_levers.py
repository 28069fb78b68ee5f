"""The staircase: which stages make which levels, the table, the page, and the command end to end."""

import dataclasses
import json
import re

import pytest

from bytescope.memory import __main__ as command
from bytescope.memory.compare import worker_pool
from bytescope.memory.view.console import plain_text
from bytescope.train.plan import levers, levers_view
from bytescope.train.plan.config_grid import ConfigRow as Row
from bytescope.train.program.config_files import load_flat
from support.browser import HOSTILE, body, browse, literally, one_file
from support.cached_rows import keep_sources
from support.json_results import read_result
from support.same_process import SameProcess

GIB = 2**30
CONFIG = {**dict.fromkeys(levers.BASELINE, ""), **dict.fromkeys(levers.STAGES["mlp_chunk"].keys, "")}
SMALL = [
    "--config.model.n_layers=2",
    "--config.model.d_model=32",
    "--config.model.d_ff=64",
    "--config.data.seq_len=16",
    "--config.batch.micro=2",
]


def level(stage, gib, limit=100, **more):
    """A level that compiled, half of it residuals."""
    size = int(gib * GIB)
    row = Row(
        {},
        peak_bytes=size,
        allocated_bytes=size,
        host_bytes=0,
        to_host_bytes=0,
        to_device_bytes=0,
        recompute_flops_fraction=0.0,
        model_flops=1e12,
        hardware_flops=1.25e12,
        limit_bytes=limit * GIB,
        breakdown={"params": size // 2, "residuals": size - size // 2},
        fits=size <= limit * GIB,
    )
    return levers.Level(
        stage,
        levers.STAGES[stage].keys,
        levers.STAGES[stage].keys,
        f"--config.here={stage}",
        "cudnn",
        dataclasses.replace(row, **more),
    )


@pytest.fixture
def levels():
    return [
        level("fp32", 600),
        level("bf16", 200),
        level("attention", 90),
        level("full", 40, host_bytes=2 * GIB, to_host_bytes=2 * GIB, to_device_bytes=3 * GIB),
    ]


# ---- pure -------------------------------------------------------------------------------------------


def test_every_level_has_all_before_it():
    made, left_out = levers.build_levels(list(levers.DEFAULT), CONFIG, (), {})
    assert [one.stage for one in made] == list(levers.DEFAULT) and not left_out
    assert made[0].keys == levers.BASELINE == made[0].adds
    last = {key: text for stage in levers.DEFAULT for key, text in levers.STAGES[stage].keys.items()}
    assert made[-1].keys == levers.BASELINE | last and made[-1].adds == {"offload.params": "true"}
    assert [one.keys["remat.policy"] for one in made] == ["none"] * 4 + ["selective"] + ["full"] * 5


def test_stages_that_cannot_be_are_left_out_and_the_next_go_on_without_them():
    lacking = {key: "" for key in CONFIG if key != "optimizer.fused_backward"}
    made, left_out = levers.build_levels(
        ["bf16", "fused_backward", "full", "selective", "adamw_8bit"], lacking, ["optimizer.name"], {"full": "no room"}
    )
    assert [one.stage for one in made] == ["bf16", "selective"] and "optimizer.name" not in made[0].keys
    assert left_out == {
        "fused_backward": "the config has no key optimizer.fused_backward",
        "full": "no room",
        "adamw_8bit": "--config.optimizer.name is given, and no stage changes a given key",
    }
    assert made[0].keys["precision.preset"] == "bf16" and made[1].keys["remat.policy"] == "selective"


def test_the_config_of_the_trainer_knows_every_default_key_or_the_stage_is_left_out():
    """A key that is renamed would drop its stage in silence: only those still to come may be missing."""
    config = load_flat("tiny", ())
    _, left_out = levers.build_levels(list(levers.STAGES), config, (), {})
    assert set(left_out) <= {"fused_backward", "offload", "offload_params", "mlp_chunk"}


@pytest.mark.quick
@pytest.mark.parametrize("stage", levers.OPTIONAL)
def test_optional_savings_print_their_flags_too(stage):
    flags = levers.flags_of(level(stage, 1))
    assert flags and all(f"--config.{key}={value}" in flags for key, value in levers.STAGES[stage].keys.items())


def test_changes_and_the_first_that_fits(levels):
    out, short = (levers.to_json(some, {}, {}, {}) for some in (levels, levels[:2]))
    assert [one["change_bytes"] for one in out["levels"]] == [None, -400 * GIB, -110 * GIB, -50 * GIB]
    assert out["first_that_fits"] == "attention" and short["first_that_fits"] is None
    assert (
        levers.changed_flags(
            {"a": "1", "b": "(x,y)", "c": "true"}, {"a": 1, "b": ("x", "y"), "c": True}, {"a": 1, "b": (), "c": False}
        )
        == "'--config.b=(x,y)' --config.c=true"
    )


# ---- the terminal -----------------------------------------------------------------------------------


def printed(levels, left_out=(), **more):
    out = levers.to_json(levels, dict(left_out), {"name": "h200"}, {"jax": "9"}, **more)
    return plain_text(levers_view.render_text(out), 100)


def test_the_staircase_on_the_terminal(levels):
    text = printed(levels, {"loss": "no such key"}, interrupted=True)
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"remat.policy=full +40\.00 +fits +-50\.00", text) and "exceeds" in text
    assert "→ cudnn" in text and "-110.00" in text and "left out: loss: no such key" in text and "stopped" in text
    assert "first that fits (+ flash attention):\n  --config.here=attention" in text
    assert text.rstrip().endswith("all stages (+ full remat):\n  --config.here=full")
    assert "no stage fits" in printed(levels[:1])
    assert "moved: bytes between" in text and "HFU/MFU: all executed" in text
    unknown = [dataclasses.replace(one, row=dataclasses.replace(one.row, model_flops=None)) for one in levels[:3]]
    assert "moved" not in printed(unknown) and "HFU/MFU" not in printed(unknown), "no legend of a missing column"


# ---- the page ---------------------------------------------------------------------------------------


def test_the_page_is_one_file_and_takes_hostile_text(levels):
    hostile = [dataclasses.replace(levels[0], flags=HOSTILE, kernel=HOSTILE), *levels[1:]]
    out = levers.to_json(hostile, {HOSTILE: HOSTILE}, {"name": HOSTILE}, {HOSTILE: "1"}, config=HOSTILE, given=HOSTILE)
    page = one_file(levers_view.render_page(out))
    assert "b" not in page.tags and literally(page) >= 5
    assert page.data == json.loads(json.dumps(levers_view.page_data(out)))


def test_the_browser_draws_the_stairs_and_the_budget(levels, tmp_path):
    out = levers.to_json(levels, {}, {"name": "h200"}, {"jax": "9"})
    script = """
      const { spec } = charts.of("stairs"), [params] = spec.series;
      document.title = [spec.series.map((one) => one.name).join("+"), params.y.join(), spec.limits[0].y,
        spec.notes.map((note) => note.text).join(), params.tips(2).includes("--config.model.attention=auto"),
        document.getElementById("cut").textContent].join(";");"""
    document = browse(tmp_path, levers_view.render_page(out), script=script, options=["--dump-dom"])
    assert 'data-ready="yes"' in body(document)
    assert re.search("<title>(.*?)<", document, re.S)[1] == (
        "params+residuals;300,100,45,20;100;▲ 600.0,200.0,90.0,40.0;true;Bars with an arrow are cut."
    )


# ---- the command ------------------------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch, capsys):
    """Four stages, one of which the config refuses; then the same out of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_sources(monkeypatch)
    monkeypatch.setattr(worker_pool, "Worker", SameProcess)
    monkeypatch.setitem(levers.STAGES, "full", dataclasses.replace(levers.STAGES["full"], keys={"remat.policy": "ful"}))
    words = [
        "compare",
        "--levers",
        "tiny",
        *SMALL,
        "cpu:1",
        "--savings=fp32,full,selective,loss",
        f"--json={tmp_path / 'l.json'}",
    ]
    assert command.main(words) == 0
    out = read_result(tmp_path / "l.json")
    assert [one["stage"] for one in out["levels"]] == ["fp32", "selective", "loss"]
    assert "choose one of" in out["left_out"]["full"] and out["first_that_fits"] == "fp32"
    first, selective, loss = out["levels"]
    assert first["residual_bytes"] > selective["residual_bytes"] > 0 == first["recompute_flops_fraction"]
    assert loss["overrides"]["remat.policy"] == "selective" and loss["kernel"] == "naive"
    assert all(sum(one["breakdown"].values()) == one["allocated_bytes"] for one in out["levels"])
    assert "left out: full: remat.policy='ful'" in re.sub(r"\s+", " ", capsys.readouterr().out)

    monkeypatch.setattr(worker_pool, "Worker", None)  # nothing may be compiled now
    assert command.main([*words[:-2], "--savings=fp32,selective", f"--html={tmp_path / 'l.html'}"]) == 0
    assert "<html" in (tmp_path / "l.html").read_text()


def test_ctrl_c_keeps_what_is_finished(monkeypatch, capsys):
    monkeypatch.setattr(worker_pool, "run", lambda jobs, **more: ({}, True))
    assert command.main(["compare", "--levers", "tiny", "cpu:1"]) == 130
    assert "stages are missing" in capsys.readouterr().out
