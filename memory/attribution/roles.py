"""What an argument of the step is, by its path in the pytree that the caller passed.

The table is tried from the top; the first pattern found in the path decides. A caller whose state is called
otherwise passes a table of its own to `memory.analyze(..., roles=...)`, which is tried before this one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from bytescope.memory.hlo.buffers import Program

# (pattern, role). Roles of arguments are rows of the breakdown.
DEFAULT = (
    (r"acc_grads|accumulat|grad_acc", "accumulator"),
    (r"opt_state|optimizer|opt\b|\b(mu|nu|trace|momentum|velocity|second_moment|v_row|v_col)\b", "optimizer"),
    (r"mini_step|gradient_step|loss_scale|\bstep\b|\bcount\b|\brng\b|\bkey\b|\bseed\b", "optimizer"),
    (r"\bgrads?\b|gradients?", "gradients"),
    (r"batch|input|target|label|token|mask|segment|position|image|\bx\b|\by\b|kv|cache|data", "batch"),
    (r"params?\b|weights?|kernel|bias|embedding|variables|\bmodel\b", "params"),
)
# An argument that no pattern knows: data the caller brings.
UNKNOWN = "batch"
_TARGETS = frozenset(("params", "optimizer", "accumulator", "gradients", "batch"))


def role(path: str, extra: Iterable[tuple[str, str]] = ()) -> str:
    """The role of the argument at `path`, as in `state.params['blocks']['wq']`; UNKNOWN when nothing matches.

    `extra` are (regular expression, role) pairs that go before the table.
    Raises ValueError for a role that is not one of the breakdown's rows, or a pattern that is not a regular expression.
    """
    root = path.split("[")[0].split(".")[0]
    for pattern, name in extra:
        if name not in _TARGETS:
            raise ValueError(f"role {name!r} for {pattern!r}: choose among {', '.join(sorted(_TARGETS))}")
        if _compiled(pattern).search(path):
            return name
    # A whole argument that is named for its role (params, opt_state, batch) settles it whatever lies below.
    whole = {"params": "params", "opt_state": "optimizer", "batch": "batch"}.get(root)
    if whole and not (whole == "optimizer" and _compiled(DEFAULT[0][0]).search(path)):
        return whole
    trunk = re.search(r"(?:\.|\[')(params|opt_state|batch)\b", path)
    if trunk and trunk[1] == "params" and "opt" not in path[:trunk.start()]:
        return "params"
    for pattern, name in DEFAULT:
        if _compiled(pattern).search(path):
            return name
    return UNKNOWN


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"role pattern {pattern!r} is not a regular expression: {error}") from error


def of_parameters(program: Program, extra: tuple[tuple[str, str], ...] = ()) -> dict[int, str]:
    """Entry parameter number -> role; `extra` and errors as for `role`."""
    module = program.module
    entry = module.computations.get(module.entry)
    out = {}
    for number, id in (entry.parameters if entry else {}).items():
        path = module.metadata(module.instructions[id]).op_name or module.instructions[id].name
        out[number] = role(path, extra)
    return out
