"""bytescope list configs | keys | policies: lists the shipped configs, the config keys and the remat policies.

The commands do not start jax.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence

from bytescope.memory.commands.targets_command import add_arguments, show_listing

__all__ = ["add_arguments", "policies", "run"]


def run(args: argparse.Namespace) -> int:
    """Prints the list that `args.command` names: configs, keys or policies. Returns the exit code.

    Raises ReportError if no row contains the text of --grep.
    """
    headings, names, make_rows = LISTINGS[args.command]
    rows = list(make_rows())
    show_listing(args, headings, rows, [dict(zip(names, row)) for row in rows])
    return 0


def _purposes() -> Iterable[Sequence[str]]:
    from bytescope.train.program.config_files import purposes

    return purposes().items()


def _keys() -> Iterable[Sequence[str]]:
    from bytescope.train.program.config_files import describe_keys

    return describe_keys()


def policies() -> Mapping[str, str]:
    """Returns remat policy -> a line that says which tensors a block stores for its backward pass."""
    from bytescope.model.remat.policies import AUTO, POLICIES

    special = {
        "custom": "the tensors named by remat.save, and in pinned host memory the tensors named by remat.offload",
        AUTO: "tensors chosen by name and range of layers, with the least recomputation that fits remat.budget",
    }
    return {**{name: row.summary for name, row in POLICIES.items() if row}, **special}


# Command -> (headings, JSON keys of the columns, a function that returns the rows).
LISTINGS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Callable]] = {
    "configs": (("config", "purpose"), ("config", "purpose"), _purposes),
    "keys": (("key", "default", "meaning"), ("key", "default", "meaning"), _keys),
    "policies": (
        ("policy", "what a block keeps for its backward pass"),
        ("policy", "keeps"),
        lambda: policies().items(),
    ),
}
