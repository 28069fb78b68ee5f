"""bytescope configs | keys | policies: what a config may say, without starting jax."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from bytescope.memory.commands.targets_command import add_arguments, show_listing
from bytescope.train.program import config_files as config

__all__ = ["add_arguments", "policies", "run"]


def run(args: argparse.Namespace) -> int:
    """Prints the listing of `args.command`. Raises ReportError where nothing mentions --grep's word."""
    headings, rows = LISTINGS[args.command]
    show_listing(args, headings, rows())
    return 0


def policies() -> Mapping[str, str]:
    """Remat policy -> what a block keeps under it, in one line."""
    from bytescope.model.remat.policies import AUTO, POLICIES

    special = {
        "custom": "the names of remat.save kept, those of remat.offload in pinned host memory",
        AUTO: "the least recomputation that fits remat.budget, chosen by name and range of layers",
    }
    return {**{name: row.summary for name, row in POLICIES.items() if row}, **special}


# Command -> (headings, a function that returns the rows).
LISTINGS: Mapping[str, tuple[tuple[str, ...], Callable]] = {
    "configs": (("config", "purpose"), lambda: config.purposes().items()),
    "keys": (("key", "default", "meaning"), config.describe_keys),
    "policies": (("policy", "what a block keeps for its backward pass"), lambda: policies().items()),
}
