"""What the routers of a run did that its memory or its loss pays for: experts without tokens, choices without room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.records.report_record import Finding
from bytescope.train.plan.config_facts import CAPACITY

# The load-balance coefficient of Switch (arXiv 2101.03961), and by how much room for rows is raised.
BALANCE, MORE_ROOM = 0.01, 1.5


def findings_of(rows: Sequence[Mapping[str, float]], config: Mapping[str, Any]) -> list[Finding]:
    """Findings of the last of a run's rows (metrics.jsonl) that has figures of routers; [] without one.

    config: dotted keys of the run. A finding has no bytes: whether an expert is idle depends on the data.
    """
    last = next((row for row in reversed(rows) if "load_max" in row), None)
    if last is None:
        return []
    found, step = [], f"at step {int(last['step']):,}"
    if idle := int(last.get("idle_experts", 0)):
        weight = float(config.get("loss.balance") or 0)
        raised = 2 * weight if weight else BALANCE
        found.append(
            Finding(
                "idle_experts",
                0,
                f"{idle:,} experts took no token {step}, counted over all layers: their parameters and "
                "state are held for nothing",
                f"raise loss.balance, now {weight:g}",
                f"--config.loss.balance={raised:g}",
            )
        )
    if dropped := last.get("dropped_share", 0.0):
        room = float(config.get("model.capacity_factor") or CAPACITY)
        found.append(
            Finding(
                "dropped_rows",
                0,
                f"{dropped:.2%} of the choices found no room {step}, and went through no expert",
                f"raise model.capacity_factor, now {room:g} times the mean load; rows take memory",
                f"--config.model.capacity_factor={MORE_ROOM * room:g}",
            )
        )
    return found
