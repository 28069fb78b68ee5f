"""Idle fractions and stored activations of schedules, beside the published formulas, and in bytescope estimate."""

from fractions import Fraction

import pytest

from bytescope.memory import cli
from bytescope.train.pipeline.schedule import held_share, idle_fraction, make_schedule
from support.json_results import read_result

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "virtual"),
    [("1f1b", 4, 8, 1), ("1f1b", 8, 32, 1), ("interleaved", 4, 8, 2), ("interleaved", 8, 16, 3), ("v", 4, 8, 2)],
)
def test_the_idle_fraction_is_the_formula(name, stages, micro_batches, virtual):
    """Narayanan et al. 2021, section 2.2: (P - 1) / (vM + P - 1) of the time; a V has the idle time of one chunk."""
    chunks = 1 if name == "v" else virtual
    formula = Fraction(stages - 1, chunks * micro_batches + stages - 1)
    assert idle_fraction(make_schedule(name, stages, micro_batches, virtual)) == pytest.approx(float(formula))


def test_stored_activations_beside_those_of_programs_of_which_every_stage_has_its_own():
    """Korthikanti et al. 2022, section 4.2.3: the first stage holds L (1 + (p - 1)/(pm)) layers, m chunks a stage. A
    tick has a forward and a backward pass, so that 1F1B holds 2 - 1/P, and a V half as much as 1F1B.
    More micro-batches take no more."""
    for micro_batches in (8, 16, 32):
        assert held_share(make_schedule("1f1b", 4, micro_batches), 32) == 2 - Fraction(1, 4)
        for chunks in (2, 3):
            assert held_share(make_schedule("interleaved", 4, micro_batches, chunks), 24) == 1 + Fraction(3, 4 * chunks)
        assert held_share(make_schedule("v", 4, micro_batches, 2), 32) == 1
    assert make_schedule("v", 8, 32, 2).stash_slots == (16,) * 8
    # The fullest of four stages has two of five layers.
    assert held_share(make_schedule("1f1b", 4, 8), 5) == 7 * Fraction(2, 5)


def test_the_estimate_has_a_line_for_each_schedule(capsys, tmp_path):
    file = tmp_path / "e.json"
    words = ["estimate", "llama_8b", "--stages=4", "--micro-batches=8", f"--json={file}"]
    assert cli.main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4 stages, a stash of 1.75 of all layers" in out
    assert "1f1b: each stage is idle 27.3 % of the time and stores 1.75 times the activations" in out
    assert "interleaved: each stage is idle 15.8 % of the time and stores 1.38 times" in out
    assert "v: each stage is idle 27.3 % of the time and stores 1 times" in out
    one = read_result(file)
    assert cli.main([*words, "--schedule=v"]) == 0 and cli.main(["estimate", "gpt:7e9", *words[2:4]]) == 0
    # A V stores 4/7 of the activations of the layers.
    kept = read_result(file)["policies"]["none"]["kept"] / one["policies"]["none"]["kept"]
    assert kept == pytest.approx(1 / 1.75)
    assert "1f1b: each stage is idle 27.3 % of the time" in " ".join(capsys.readouterr().out.split())


def test_the_stages_of_a_config_are_those_of_its_keys(capsys, tmp_path):
    """Flags and keys give the same estimate; a schedule that does not exist for these sizes says why."""
    file = tmp_path / "e.json"
    keys = {"mesh.stage": 4, "batch.accumulation": 6, "batch.mode": "scan"}
    assert cli.main(["estimate", "llama_8b", *(f"--config.{k}={v}" for k, v in keys.items()), f"--json={file}"]) == 0
    by_keys = read_result(file)
    assert "interleaved cannot run 6 micro-batches over 4 stages" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["estimate", "llama_8b", "--stages=4", "--micro-batches=6", f"--json={file}"]) == 0
    assert read_result(file)["policies"] == by_keys["policies"]
