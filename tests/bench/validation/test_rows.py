"""The published runs: each has a config of ours or a reason, and nanotron's byte sums are its measured peaks.

pytest tests/bench/validation
"""

import datetime
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import measured_rows
import nanotron_bytes
import setups_playbook
import validation_score
from measured_rows import MeasuredRow
from validation_score import ScoredRun

from bytescope.memory.devices.chips import CHIPS
from bytescope.train.plan.config_factory import check_config


@pytest.mark.parametrize(
    ("name", "count", "compared"), [("playbook", 551, 551), ("jax", 254, 104), ("torch", 332, 264)]
)
def test_every_row_has_a_config_or_a_reason(name, count, compared):
    rows = measured_rows.rows(name)
    assert (len(rows), sum(not row.reason for row in rows)) == (count, compared)
    for row in rows:
        assert bool(row.reason) != bool(row.config and row.overrides and row.target), row
        assert row.reason or (row.chip in CHIPS and (row.measured_seconds or row.measured_bytes)), row
        assert 2020 <= datetime.date.fromisoformat(f"{row.published}-01").year <= 2026, row
    for row in rows[::7]:
        if row.config:
            check_config(row.config, list(row.overrides.items()))


def test_choices_say_whether_the_outcome_was_known():
    for choice in measured_rows.facts("choices"):
        datetime.date.fromisoformat(choice["date"])
        assert choice["outcome_known"] in ("yes", "no", "partly")
        assert all(choice[column] for column in ("rows", "choice", "reason", "source")), choice


def test_the_byte_sum_is_the_allocated_peak_of_old_bench():
    for fact in measured_rows.facts("old_bench"):
        if fact["pp"] == "1":
            split = int(fact["tp"])
            vocab = -(-50257 // split) * split
            run = setups_playbook.nanotron_run(fact, setups_playbook.OLD_SHAPE, vocab, asynchronous=False)
            rest = float(fact["peak_allocated_mib"]) - nanotron_bytes.total(nanotron_bytes.terms(run)) / 2**20
            assert 0 < rest < 20, fact  # MiB, of 4.5 to 59 GiB


def test_scores_by_hand():
    runs = []
    for measured, predicted, tensor in ((1.0, 2.0, 1), (1.04, 1.0, 2), (2.0, 2.0, 2), (4.0, 5.0, 1)):
        row = MeasuredRow(
            "s", f"{measured}", "m", "h100", 8, {}, "tiny", "h100:8", measured, 100, "A", "a: b", tensor=tensor
        )
        runs.append(ScoredRun(row, predicted, predicted, predicted, predicted, 90))
    (group,) = validation_score.groups(runs)
    # 1 against 1.04 is not apart. 1-2 is a tie, the others are right.
    assert (group.order.pairs.count, group.order.pairs.right) == (5, 0.9)
    assert (group.all.within, group.all.bytes_median, group.all.bytes_below) == (0.5, 0.9, 1.0)
