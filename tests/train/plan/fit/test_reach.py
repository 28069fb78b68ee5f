"""Adapters: bases that a fit weighs against recomputation, and the ranks and lengths that fit besides."""

import pytest

from bytescope.memory.compare.fit_view import render_text
from bytescope.memory.view.console import plain_text
from bytescope.train.plan.fit.fit_reach import RANKS, Reach
from bytescope.train.plan.fit.fit_tables import tables_of
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
    return plain_text(render_text(out, tables_of(out)), 100)


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


def test_lengths_are_found_without_stages():
    """One sequence at once does not pass through several of them."""
    done = fitted(12, LEVERS + ",sharding", devices="h100:8", model_scan=True, batch_accumulation=32)
    assert any("stage" in step.what and step.fits for step in done.steps)
    found = reached(done).rows
    assert found and not [row for row in found if row.step.keys.get("mesh.stage", "1") != "1"]


def longest(done, policy=FULL):
    """Rank -> the longest that fits, from the answers."""
    return {
        row.rank: row.length
        for row in reached(done).rows
        if row.most == "length" and row.policy == policy and row.step.fits
    }


@pytest.mark.parametrize("budget, tokens", [(12, 8), (8, 4), (10.5, 7)])
def test_the_longest_of_a_rank(budget, tokens):
    """2 GiB of frozen weights, 1 of workspace, 0.016 a rank, 1 for each SEQ: everything recomputed, one at once."""
    found = reached(fitted(budget, given=[("lora.rank", "16")]))
    (answer,) = (row for row in found.rows if row.most == "length")
    assert answer.length == tokens * SEQ and answer.beyond == ((tokens + 1) * SEQ if tokens < 8 else 0)
    assert all((row.base, row.micro) == ("nf4", 1) for row in found.variants if row.most == "length")
    tried = [row.length for row in found.variants if row.most == "length" and not row.step.fits]
    assert answer.beyond == min(tried, default=0)


def test_the_longest_of_each_rank_from_few_compiles():
    """Rank 8 takes 3.13 GiB besides its sequence, 16 3.26, 64 4.02 and 256 7.1 of 10.2."""
    done = fitted(10.2)
    assert longest(done) == {8: 7 * SEQ, 16: 6 * SEQ, 64: 6 * SEQ, 256: 3 * SEQ}
    found = reached(done)
    tried = {
        rank: [row.length // SEQ for row in found.variants if row.rank == rank and row.most == "length"]
        for rank in RANKS
    }
    # Rank 64 fits at once where rank 16 does: neither its neighbour nor anything shorter is compiled.
    assert tried[64] == [6] and all(len(lengths) <= 3 for rank, lengths in tried.items() if rank != 8)


def test_block_inputs_in_host_memory_go_further():
    done = fitted(8.5, LEVERS + ",offload")
    device, host = longest(done), longest(done, "offload")
    assert all(host[rank] > device[rank] for rank in RANKS)
    answers = [row for row in reached(done).rows if row.most == "length"]
    assert all((row.step.answer["host_bytes"] > 0) == (row.policy == "offload") for row in answers)


def test_the_largest_micro_batch_of_each_rank():
    """Micro-batches divide the update of 8; what fits is 8 - 3.26 GiB at rank 16, of 1 GiB and the layer's 4."""
    found = reached(fitted(11))
    answers = {row.rank: (row.micro, row.beyond) for row in found.rows if row.most == "micro"}
    assert answers == {8: (4, 8), 16: (4, 8), 64: (4, 8), 256: (2, 4)}
    tried = [(row.rank, row.micro) for row in found.variants if row.most == "micro"]
    assert (64, 8) not in tried and len(set(tried)) == len(tried)
    held = reached(fitted(11, given=[("batch.micro", "1")]))
    assert not [row for row in held.rows if row.most == "micro"]


def test_the_whole_update_at_once():
    answers = [row for row in reached(fitted(60)).rows if row.most == "micro"]
    assert {(row.micro, row.beyond, row.verdict) for row in answers} == {(8, 0, "the whole update at once")}


def test_a_rank_that_is_given_is_the_only_one():
    assert {row.rank for row in reached(fitted(30, given=[("lora.rank", "16")])).rows} == {16}


def test_lengths_that_are_given_stay():
    assert {row.most for row in reached(fitted(30, given=[("data.seq_len", "1024")])).rows} == {"micro"}


def test_a_config_that_is_too_long_is_shortened():
    done = fitted(6, data_seq_len=4 * SEQ)
    assert done.best is None and longest(done)[16] == 2 * SEQ


def test_nothing_fits_at_any_rank():
    """The least of the smallest rank is shown, with what is missing; larger ranks take more."""
    rows = reached(fitted(2)).rows
    assert [(row.rank, row.most, row.step.fits) for row in rows] == [(8, "micro", False), (8, "length", False)]
    assert all("over" in row.verdict for row in rows) and rows[1].length == SEQ


def test_rows_are_ordered_and_printed():
    done = fitted(8)
    found = reached(done)
    rows = found.rows
    assert [row.rank for row in rows] == sorted(row.rank for row in rows)
    out = as_json(done, found)
    assert [(row["length"], row["beyond"]) for row in out["reach"]] == [(row.length, row.beyond) for row in rows]
    text = printed(out)
    assert "Limits of each LoRA rank" in text and "5,120 do not fit" in text
    assert max(map(len, text.splitlines())) <= 100 and "each LoRA rank" not in printed(as_json(done))


def test_limits_hold_for_what_is_tried_besides():
    compiles = fitted(30).limits.compiles
    found = reached(fitted(30, most=compiles + 1))
    assert as_json(found.walk, found)["stopped"].startswith("the limit on compiles")
    assert not reached(fitted(30, most=2)).variants
