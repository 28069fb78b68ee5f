"""`plan_remat`: the least recomputation under a budget for a model that is not ours, compiled."""

import dataclasses
from pathlib import Path

import jax
import pytest

from bytescope import memory
from bytescope.memory import ReportError
from bytescope.memory.cost import flops
from bytescope.memory.remat.recognition import RematPolicy
from bytescope.memory.remat.remat_problem import CompiledPlan, KeepPattern, LayerPlan, PlanFigures, SearchOutcome
from bytescope.memory.report.remat_planning import Built, PolicyCompiler, _nothing_fits
from support.browser import HOSTILE, Page
from support.models import plain as foreign

SCAN = next(
    number for number, line in enumerate(Path(foreign.__file__).read_text().splitlines(), 1) if "jax.lax.scan(" in line
)


@pytest.fixture(scope="module")
def planned():
    """A plan for a budget between what jax's own policies take, and the lines that were told."""
    lines = []
    return memory.plan_remat(foreign.loss_of("scan"), foreign.arguments(8), "cpu", "2000KiB", tell=lines.append), lines


@pytest.mark.quick
def test_a_device_of_unknown_memory_is_refused_in_one_line():
    compiler = object.__new__(PolicyCompiler)  # without compiling anything
    compiler.full = Built(None, memory.Report(1, 1, {}), flops.FlopCount())
    with pytest.raises(ReportError, match="give a target"):
        compiler.budget("1GiB")


def test_a_plan_fits_and_recomputes_less_than_any_policy_of_jax_that_fits(planned):
    plan, _ = planned
    fitting = [row.recomputed_flops for row in plan.built_in if row.allocated_bytes <= plan.budget_bytes]
    assert isinstance(plan, memory.RematPlan) and isinstance(plan.policy, RematPolicy)
    assert len(plan.built_in) == 4 and plan.allocated_bytes <= plan.budget_bytes
    assert plan.recomputed_flops < min(fitting)


def test_the_certificate_is_that_of_the_users_own_program(planned):
    """With the policy given to its own checkpoint the model takes the bytes and the FLOPs that were promised."""
    plan, _ = planned
    traced = jax.jit(jax.value_and_grad(foreign.loss_of("scan", plan.policy))).trace(*foreign.arguments(8))
    assert flops.count(traced.jaxpr).recomputed == plan.recomputed_flops
    assert memory.analyze(traced, target="cpu").allocated_bytes == plan.allocated_bytes == plan.report.allocated_bytes
    applied = jax.jit(jax.value_and_grad(plan.apply(foreign.loss_of("scan")))).trace(*foreign.arguments(8))
    assert flops.count(applied.jaxpr).recomputed == plan.recomputed_flops
    plan.check()


def test_the_account(planned, monkeypatch):
    plan, lines_told = planned
    lines = str(plan).splitlines()
    assert lines[0].startswith("remat plan on cpu:1  ")
    assert lines[1] == f"4 x block at tests/support/models/plain.py:{SCAN}, under jax.checkpoint"
    kept = [line for line in lines[2:] if "tests/support/models/plain.py:" in line]
    assert len(kept) == len(plan.kept) > 0 and all("KiB" in line and "float32[8,32," in line for line in kept)
    assert [line.split()[0] for line in lines if line.endswith(("fits", "exceeds"))] == [
        "this",
        "nothing_saveable",
        "everything_saveable",
        "dots_with_no_batch_dims_saveable",
        "dots_saveable",
    ]
    monkeypatch.setenv("FORCE_COLOR", "1")  # as the kernel of a notebook does
    assert repr(plan) == str(plan) and "\x1b" not in repr(plan)
    in_a_cell = dataclasses.replace(plan.layers[0], where="/tmp/ipykernel_12/3456.py:7")
    assert " at cell:7" in repr(dataclasses.replace(plan, layers=(in_a_cell,)))
    builtin = repr(dataclasses.replace(plan, name="dots_saveable", kept=()))
    assert "jax.checkpoint_policies.dots_saveable is best here" in builtin and "this plan" not in builtin
    assert len(lines_told) == plan.compiled


def test_the_account_in_a_notebook(planned):
    """It has the text of the account, and names are text."""
    plan, _ = planned
    words = "".join(Page(plan._repr_html_()).words).replace(" ", "")
    for line in str(plan).splitlines():
        assert line.replace(" ", "") in words, line
    hostile = dataclasses.replace(plan, target=HOSTILE, built_in=())
    assert "<b>x" not in hostile._repr_html_()


@pytest.mark.quick
@pytest.mark.parametrize(
    "budget, message", [("much", "budget: 'much' is not a valid size"), (0, "budget=0 is out of range: a device has")]
)
def test_budgets_that_cannot_be(budget, message):
    with pytest.raises(ReportError, match=message):
        memory.plan_remat(foreign.loss_of("scan"), foreign.arguments(), "cpu", budget)


@pytest.mark.quick
def test_a_budget_below_the_least_is_told_the_least():
    tried = CompiledPlan(LayerPlan(((KeepPattern(10, 0.0, policy="full"), 1),)), 0, PlanFigures(3 * 2**20))
    refused = _nothing_fits(SearchOutcome(None, (tried,), tried), 2**20)
    assert str(refused) == (
        "nothing fits 1.00 MiB: with nothing_saveable the step takes 3.00 MiB, 2.00 MiB more; "
        "give a larger budget or a smaller batch"
    )
