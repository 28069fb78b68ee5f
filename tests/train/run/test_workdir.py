"""The run directory: what may change between starts, what may not, and rows that survive a kill."""

import json

import pytest

from bytescope.train.config import override
from bytescope.train.errors import UserError
from bytescope.train.run.metrics import MetricsLog, matmul_parameters, model_flops_per_token
from bytescope.train.run.workdir import Identity, claim, new_workdir
from support.toy import small_config

pytestmark = pytest.mark.quick


def identity(rows=16, data="abc", **changes):
    config = small_config()
    for key, value in changes.items():
        override(config, key.replace("__", "."), str(value))
    return Identity.of(config, rows, data)


@pytest.mark.parametrize("change", [
    {"mesh__fsdp": 4}, {"batch__micro": 2}, {"batch__mode": "scan"}, {"remat__policy": "full"}, {"loss__kind": "full"},
    {"model__attention": "chunked"}, {"data__source": "elsewhere"}])
def test_what_does_not_move_the_curve_may_change_with_a_note(tmp_path, change):
    claim(tmp_path / "run", identity(), extend=False)
    notes = claim(tmp_path / "run", identity(**change), extend=False)
    key = next(iter(change)).replace("__", ".")
    assert len(notes) == 1 and key in notes[0] and "->" in notes[0]


@pytest.mark.parametrize("change", [{"train__log_every": 3}, {"train__checkpoint_every": 9}, {"data__workers": 1}, {}])
def test_cadence_may_change_silently(tmp_path, change):
    claim(tmp_path / "run", identity(), extend=False)
    assert claim(tmp_path / "run", identity(**change), extend=False) == []


@pytest.mark.parametrize(("change", "shown"), [
    ({"model__d_ff": 64}, "model.d_ff 48 -> 64"), ({"seed": 3}, "seed 0 -> 3"),
    ({"optimizer__learning_rate": 0.5}, "optimizer.learning_rate 0.01 -> 0.5"),
    ({"precision__preset": "bf16"}, "precision.preset 'fp32' -> 'bf16'"),
    ({"data__seq_len": 16}, "data.seq_len 32 -> 16"),
    ({"rows": 8}, "global batch (sequences) 16 -> 8"), ({"data": "xyz"}, "data 'abc' -> 'xyz'")])
def test_another_run_is_refused_with_the_difference(tmp_path, change, shown):
    claim(tmp_path / "run", identity(), extend=False)
    before = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(UserError) as caught:
        claim(tmp_path / "run", identity(**change), extend=False)
    assert shown in str(caught.value) and "another --workdir" in str(caught.value)
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_more_steps_need_extend(tmp_path):
    claim(tmp_path / "run", identity(), extend=False)
    with pytest.raises(UserError, match="planned for 20 steps, not 30.*--extend"):
        claim(tmp_path / "run", identity(train__steps=30), extend=False)
    assert claim(tmp_path / "run", identity(train__steps=30), extend=True) == []


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(UserError, match="does not hold a run"):
        claim(tmp_path, identity(), extend=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_identity_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        claim(tmp_path, identity(), extend=False)


def test_new_workdirs_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = new_workdir("tiny")
    first.mkdir(parents=True)
    assert new_workdir("tiny") != first and first.parts[0] == "runs"


def test_metrics_drop_a_torn_line_and_rows_past_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0 / step})
    log.close()
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')
    log = MetricsLog(path, 2)
    log.write({"step": 3, "loss": 9.0})
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 9.0}]


def test_rows_are_on_disk_before_the_next_step(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write({"step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    log.close()


def test_model_flops_equal_the_published_formula():
    """Korthikanti et al. 2022: 72 B L s h^2 (1 + s/(6h) + v/(12hL)) per iteration for GPT shapes."""
    from bytescope.configs import gpt3_175b
    from bytescope.model import ModelConfig
    config = gpt3_175b.get_config()
    model = ModelConfig.from_dict(config.model)
    h, L, s, v = model.d_model, model.n_layers, config.data.seq_len, model.vocab_size
    published = 72 * L * s * h**2 * (1 + s / (6 * h) + v / (12 * h * L))
    assert model_flops_per_token(model, s) * s == pytest.approx(published, rel=1e-9)
    assert matmul_parameters(model) == pytest.approx(174.6e9, rel=0.01)
