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
    "generate --limit": "use --budget",
    "names": "write bytescope report SUBJECT --names",
    "audit": "write bytescope report SUBJECT --audit",
    "trace": "write bytescope report TRACE, or bytescope report RUN --trace=TRACE",
    "page": "write bytescope report RUN --html=FILE, or bytescope diff RUN RUN for two runs",
    "init-program": "write bytescope report SCRIPT, and --save-program=FILE to keep the program",
    "levers": "write bytescope compare CONFIG --levers",
    "front": "write bytescope fit CONFIG --budgets=N",
    "fit --levers": "write --vary",
    "score": "write bytescope generate RUN_OR_FOLDER --score=FILE",
    "quantize": "write bytescope export RUN_OR_FOLDER OUT --awq=TEXT",
    "configs": "write bytescope list configs",
    "targets": "write bytescope list targets",
    "keys": "write bytescope list keys",
    "policies": "write bytescope list policies",
    "completion": "bytescope --print-completion bash prints the script for bash; zsh, tcsh and fish are the others",
    "report --fix": _BY_HAND,
    "report --write": _BY_HAND,
    "report --small": _BY_HAND,
    "report --fix-sharding": "put jax.lax.with_sharding_constraint on the array that the audit names, and compare the "
    "reports with bytescope diff",
    "validate": "bytescope calibrate --runs=FILE|DIR compares predictions with your own runs",
    "pipeline": "bytescope estimate CONFIG --stages=P --micro-batches=M shows the idle fraction and the stored "
    "activations of each schedule",
    "calibrate --from-runs": "write --runs=FILE|DIR",
}


def refuse_gone(command: str, argv: Sequence[str]) -> None:
    """Raises UserError if a command line has a command or a flag that is gone.

    argv: the arguments after the command. Those after "--" belong to another program.
    """
    own = argv[: argv.index("--")] if "--" in argv else argv
    for words in (command, *(f"{command} {argument.partition('=')[0]}" for argument in own)):
        if words in GONE:
            raise UserError(f"{words} is gone: {GONE[words]}")
