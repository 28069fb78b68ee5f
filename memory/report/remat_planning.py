"""Compiles the training step of anyone's loss under the policies that a search asks for."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from bytescope.memory.analysis import report_of
from bytescope.memory.cost import flops, roofline
from bytescope.memory.devices import limits
from bytescope.memory.devices.targets import Target
from bytescope.memory.errors import ReportError
from bytescope.memory.program.compilation import compiled_for
from bytescope.memory.remat.layer_discovery import layers_of
from bytescope.memory.remat.layer_values import LayerValues, values_of
from bytescope.memory.remat.loss_gradient import Loss
from bytescope.memory.remat.recognition import RematPolicy
from bytescope.memory.remat.remat_problem import LayerPlan, PassSeconds, PlanFigures, RecomputeRates, RematProblem
from bytescope.memory.remat.remat_search import FULL, NONE
from bytescope.memory.report.report_object import Report

# What comes with jax: the search's name -> that of `jax.checkpoint_policies`.
BUILT_IN = {
    FULL: "nothing_saveable",
    "dots_with_no_batch_dims_saveable": "dots_with_no_batch_dims_saveable",
    "dots_saveable": "dots_saveable",
    NONE: "everything_saveable",
}


class PolicyCompiler:
    """Compiles the step of a loss under the policies that a search asks for."""

    def __init__(self, loss: Loss, target: Target | str | None, optimizer: Any, blocks: Collection[str]):
        self.loss, self.optimizer, self._target = loss, optimizer, target
        self.layers = layers_of(loss.jaxpr, loss.active, blocks)
        self.values: LayerValues = values_of(self.layers, loss.shards)
        self.built: dict[str, Built] = {}
        # What recomputes everything tells the target, and whether the layers are walked in this program as alone.
        probe = RematPolicy(self.values.wanted(()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.full = self.built[FULL] = self._build(probe)
        if probe.lost:
            self.values = values_of(self.layers, loss.shards, ordered=False)

    def policy(self, plan: LayerPlan) -> Any:
        """A policy of jax's own for a plan that is one, else one that keeps the plan's values."""
        import jax

        name = name_of(plan)
        if name:
            return getattr(jax.checkpoint_policies, BUILT_IN[name])
        return RematPolicy(self.values.wanted(plan.ranges[0][0].save))

    def _build(self, policy: Any) -> Built:
        traced = self.loss.step(self.layers, policy, self.optimizer)
        compilation, target = compiled_for(traced, target=self._target)
        return Built(policy, Report.of(report_of(compilation, target=target)), flops.count(traced.jaxpr))

    def __call__(self, plans: Sequence[LayerPlan]) -> list[PlanFigures]:
        """The compiler's figures of each plan."""
        return [self._one(plan) for plan in plans]

    def _one(self, plan: LayerPlan) -> PlanFigures:
        name = name_of(plan) or str(plan)
        if name not in self.built:
            try:
                self.built[name] = self._build(self.policy(plan))
            except ReportError:
                raise
            except (ValueError, RuntimeError, NotImplementedError) as error:  # the search leaves it out
                return PlanFigures(status=" ".join(str(error).split()))
        built = self.built[name]
        if isinstance(built.policy, RematPolicy) and name != FULL:
            built.policy.check()
        return PlanFigures(built.report.allocated_bytes, built.report.host_bytes, 0.0, built.counted.recomputed)

    def budget(self, budget: str | float | None) -> int:
        """Bytes that the program may allocate: the budget, at most what the target leaves to it."""
        report = self.full.report
        if report.limit_bytes is None:
            raise ReportError('the memory of the device is not known: name a target, such as target="h100"')
        limit = report.limit_bytes - (report.predicted_bytes - report.allocated_bytes)
        return limits.budget_of(written(budget), limit, "budget")

    def problem(self) -> RematProblem:
        """The problem that the search solves: the fewest FLOPs recomputed."""
        rates = RecomputeRates(dict.fromkeys(roofline.UNITS, 1.0), 1.0)
        policies = {name: None for name in BUILT_IN if name not in (FULL, NONE)}
        return RematProblem(self.values.graph, rates, PassSeconds(), "flops", policies=policies)


@dataclasses.dataclass(frozen=True)
class Built:
    """A policy, the report of the program under it, and its FLOPs."""

    policy: Any
    report: Report
    counted: flops.FlopCount


def written(budget: str | float | None) -> str:
    """A budget as `limits.budget_of` reads it."""
    if budget is None:
        return ""
    return budget if isinstance(budget, str) else f"{budget:.0f}"


def name_of(plan: LayerPlan) -> str:
    """The name under which the search knows a policy of jax's own; "" for a choice of values."""
    return plan.ranges[0][0].policy
