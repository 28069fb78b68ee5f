"""Adapters: bases that a fit weighs against recomputation, and the ranks and lengths that fit besides."""

import io

import pytest

from bytescope.memory.plan.fit.reach import RANKS, Reach
from bytescope.memory.text import fit as fit_text
from bytescope.memory.text.console import make_console
from support.fit_trials import GIB, SEQ, as_json, walk

pytestmark = pytest.mark.quick

LEVERS = "remat,micro,accumulation,base"
FULL = "full"


def fitted(budget, levers=LEVERS, **more):
    return walk(budget, levers, lora_rank=16, **more)


def reached(done):
    found = Reach(done)
    found.run()
    return found


def printed(out):
    console = make_console(file=io.StringIO(), width=100)
    fit_text.show(out, "x", console)
    return console.file.getvalue()


def test_the_base_is_the_fastest_that_fits():
    """16 bits where there is room for all activations; less where that saves more recomputation than decoding costs."""
    wide, narrow = fitted(30), fitted(12)
    assert wide.best.keys.get("lora.base") is None and wide.best.answer["recompute_flops_fraction"] == 0
    assert narrow.best.keys["lora.base"] == "nf4" and narrow.best.allocated <= 12 * GIB
    held = fitted(12, "remat,micro,accumulation")
    assert held.best.seconds > narrow.best.seconds and "lora.base" not in held.best.keys
    assert {step.keys.get("lora.base") for step in wide.steps} == {None, "int8", "nf4"}


def test_a_base_that_alone_fits_is_taken_and_told():
    done = fitted(5)
    assert done.best.keys["lora.base"] == "nf4" and "base=nf4" in done.best.what
    assert fitted(3).best is None


@pytest.mark.parametrize("budget, longest", [(12, 8), (8, 4), (10.5, 7)])
def test_lengths_are_doubled_and_halved(budget, longest):
    """2 GiB of frozen weights, 1.26 of the rest, 1 for each SEQ: everything recomputed, one sequence at once."""
    rows = [row for row in reached(fitted(budget)).found if row.policy == FULL]
    assert max(row.length for row in rows if row.step.fits) == longest * SEQ
    assert all((row.base, row.micro) == ("nf4", 1) for row in rows)
    failed = [row.length for row in rows if not row.step.fits]
    assert all(length > longest * SEQ for length in failed) and (not failed or min(failed) == (longest + 1) * SEQ)


def test_block_inputs_in_host_memory_go_further():
    done = fitted(8, LEVERS + ",offload")
    rows = reached(done).found
    assert {row.policy for row in rows if row.length == 8 * SEQ} == {"full", "offload"}


def test_ranks_are_those_of_the_choice():
    done = fitted(30)
    rows = {row.rank: row for row in reached(done).found if row.policy == "as chosen"}
    assert set(rows) == set(RANKS) and rows[256].step.allocated - rows[64].step.allocated == pytest.approx(
        0.192 * 16 * GIB, rel=1e-6)
    assert not [row for row in reached(fitted(30, given=[("lora.rank", "16")])).found if row.policy == "as chosen"]


def test_lengths_that_are_given_stay():
    assert not [row for row in reached(fitted(30, given=[("data.seq_len", "1024")])).found if row.policy == FULL]


def test_a_config_that_is_too_long_is_shortened():
    done = fitted(6, data_seq_len=4 * SEQ)
    lengths = {row.length: row.step.fits for row in reached(done).found if row.policy == FULL}
    assert done.best is None and lengths[4 * SEQ] is False and lengths[2 * SEQ] is True


def test_rows_are_ordered_and_printed():
    done = fitted(8)
    found = reached(done)
    rows = found.rows
    fits = [row for row in rows if row.step.fits]
    assert rows[:len(fits)] == fits and fits == sorted(fits, key=lambda row: -row.tokens_per_s)
    out = as_json(done, found)
    assert [row["length"] for row in out["reach"]] == [row.length for row in rows]
    text = printed(out)
    assert "other ranks and lengths" in text and "8,192" in text and "GiB over" in text
    assert max(map(len, text.splitlines())) <= 100 and "other ranks" not in printed(as_json(done))


def test_limits_hold_for_what_is_tried_besides():
    compiles = fitted(30).trials.compiles
    found = reached(fitted(30, most=compiles + 1))
    assert found.stopped.startswith("the limit on compiles") and as_json(found.walk, found)["stopped"] == found.stopped
    assert not reached(fitted(30, most=2)).found
