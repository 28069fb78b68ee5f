"""Commands and flags that earlier versions had, with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bytescope.train.user_errors import UserError

_BY_HAND = "nothing writes into source files; make the change that the sentence below the table names"
# "COMMAND" or "COMMAND --flag" -> what to use instead, as the end of a one-line message.
GONE: Mapping[str, str] = {
    "estimate --width": "use --d-model",
    "estimate --head-width": "use --d-head",
    "estimate --mlp-width": "use --d-ff",
    "estimate --sequence": "use --length",
    "fit --timeout": "use --max-seconds",
    "front --offload": "use --auto-offload",
    "generate --limit": "use --budget",
    "levers --stages": "use --savings",
    "quantize --limit": "use --budget",
    "quantize --plan": "use --target",
    "score --limit": "use --budget",
    "completion": "bytescope --print-completion bash prints the script for bash; zsh, tcsh and fish are the others",
    "audit --fix": _BY_HAND,
    "audit --write": _BY_HAND,
    "audit --small": _BY_HAND,
    "audit --fix-sharding": "put jax.lax.with_sharding_constraint on the array that the audit names, and compare the "
    "reports with bytescope diff",
}


def refuse_gone(command: str, argv: Sequence[str]) -> None:
    """Raises UserError if a command line has a command or a flag that is gone.

    argv: the arguments after the command. Those after "--" belong to another program.
    """
    own = argv[: argv.index("--")] if "--" in argv else argv
    for words in (command, *(f"{command} {argument.partition('=')[0]}" for argument in own)):
        if words in GONE:
            raise UserError(f"{words} is gone: {GONE[words]}")
