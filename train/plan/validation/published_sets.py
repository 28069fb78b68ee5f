"""The sets of measured rows by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.train.plan.validation.measured_rows import Row

# Set -> what it holds, in a line; `setups_NAME.py` has its rows.
SETS: Mapping[str, str] = {
    "playbook": "the Ultra-Scale Playbook's own runs of nanotron on 8, 32 and 64 H100",
    "jax": "MaxText, Pax, Alpa and UvA's tutorial on A5000, V100, A100, H100, H200 and B200",
    "torch": "llm-foundry and fms-fsdp on A100 and H100",
}


def rows(name: str) -> tuple[Row, ...]:
    """The rows of a set. Raises ReportError for a set that does not exist."""
    if name not in SETS:
        raise ReportError(f"no set {name!r}: {remedy_for(name, SETS)}")
    return importlib.import_module(f"bytescope.train.plan.validation.setups_{name}").rows()
