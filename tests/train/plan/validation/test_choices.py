"""The files of choices and of held-out sources: complete, and read by the command."""

import datetime

import pytest

from bytescope.train.plan.validation import measured_rows, setups_jax, setups_torch

# Sources without a compared row: nothing was chosen.
UNUSED = {"t5x", "t5x_vit", "xla_pr45753", "nemo_2412", "nemo_launcher"}


@pytest.mark.quick
def test_choices_are_dated_and_say_whether_the_outcome_was_known():
    found = measured_rows.facts("choices")
    assert {choice["set"] for choice in found} == {*measured_rows.SETS, "all"}
    for choice in found:
        datetime.date.fromisoformat(choice["date"])
        assert choice["outcome_known"] in ("yes", "no", "partly")
        assert all(choice[column] for column in ("rows", "choice", "reason", "source")), choice


@pytest.mark.quick
@pytest.mark.parametrize(("name", "module"), [("jax", setups_jax), ("torch", setups_torch)])
def test_every_source_with_a_setup_is_among_the_choices_of_its_set(name, module):
    named = " ".join(choice["rows"] for choice in measured_rows.facts("choices") if choice["set"] == name)
    missing = {source for source in module.SETUPS if source not in named} - UNUSED
    assert not missing
    compared = {row.source_id for row in measured_rows.rows(name) if row.config}
    assert not compared & UNUSED


@pytest.mark.quick
def test_choices_of_a_set_include_those_of_all_sets_oldest_first():
    found = measured_rows.choices("jax")
    assert {choice["set"] for choice in found} == {"jax", "all"}
    assert [choice["date"] for choice in found] == sorted(choice["date"] for choice in found)


@pytest.mark.quick
def test_held_out_sources_have_the_named_rows():
    for held in measured_rows.facts("held_out"):
        rows = [row for row in measured_rows.rows(held["set"]) if row.source_id == held["source_id"]]
        counted = [
            row for row in rows if row.measured_seconds and row.quality in ("A", "B") and "wresnet" not in row.model
        ]
        assert len(counted) == int(held["rows"]) >= 20, held["source_id"]
        assert held["published"] <= max(row.published for row in counted)


@pytest.mark.quick
@pytest.mark.parametrize("name", measured_rows.SETS)
def test_every_row_says_when_it_was_published(name):
    for row in measured_rows.rows(name):
        assert 2020 <= datetime.date.fromisoformat(f"{row.published}-01").year <= 2026, row


@pytest.mark.quick
def test_another_program_is_in_its_cohort_and_keeps_its_config():
    rows = [row for row in (*measured_rows.rows("jax"), *measured_rows.rows("torch")) if row.other_program]
    assert any(row.config and row.overrides.get("precision.preset") == "fp8" for row in rows)
    assert all(row.cohort and not row.claims_seconds for row in rows)


@pytest.mark.quick
@pytest.mark.parametrize("name", [*measured_rows.SETS, "choices", "held_out"])
def test_every_line_of_a_table_has_all_columns(name):
    for fact in measured_rows.facts(name):
        assert None not in fact and None not in fact.values(), fact
