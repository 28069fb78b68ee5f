"""Reads any compiled JAX program, and plans configurations of the trainer: the commands of this package.

`python -m bytescope.memory COMMAND` is `bytescope COMMAND`; the one front of all commands is train/cli.py.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

from bytescope.memory.commands.arguments import Parser, chosen_rates, settle_subject
from bytescope.memory.compare.trainer import Trainer
from bytescope.memory.errors import ReportError, did_you_mean, exit_code_of
from bytescope.memory.view.console import settle_stdout
from bytescope.memory.view.text_layout import broken

# Command -> (module with add_arguments(parser) and run(args, overrides, trainer) -> exit code, what it does, examples).
COMMANDS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "report": (
        "memory.commands.report_command",
        "peak, composition, timeline and findings of one program",
        (
            "llama_8b h200:8 --html=report.html",
            "--program=my_package.train:program h100:8",
            "--hlo=step.after_optimizations.hlo.pb --json=a.json",
        ),
    ),
    "compare": (
        "memory.commands.compare_command",
        "remat policies, or any keys of a config, against each other",
        (
            "llama_8b h200:8 --remat=none,full,dots --html=c.html",
            "--grid=config=llama_8b,llama_70b --grid=data.seq_len=1024,4096 --remat=none,full --target=h100:8",
        ),
    ),
    "levers": (
        "train.commands.levers_command",
        "what each memory saving saves and costs, one after the other",
        ("llama_8b h200 --html=levers.html", "llama_8b rtx4090 --savings=bf16,full,offload"),
    ),
    "fit": (
        "train.commands.fit_command",
        "from a budget to the fastest configuration that fits it",
        ("llama_8b h100:8 --batch-tokens=4194304", "llama_8b rtx4090 --budget=20GiB --levers=remat,micro"),
    ),
    "front": (
        "train.commands.front_command",
        "at each of ten budgets the least recomputation that fits",
        ("llama_8b h100:8 --html=front.html", "llama_8b h100:8 --to=42GiB --cost=flops --auto-offload"),
    ),
    "estimate": (
        "train.commands.estimate_command",
        "bytes and FLOPs by formula, at once; a page with inputs",
        ("--params=7e9", "llama_8b --zero=3 --data=8 --html=estimate.html"),
    ),
    "pipeline": (
        "train.commands.pipeline_command",
        "the schedules of a pipeline: ticks, bubble, stash by stage",
        ("--stages=8 --micro-batches=32", "--stages=4 --micro-batches=8 --schedule=1f1b --html=pipeline.html"),
    ),
    "names": (
        "train.commands.names_command",
        "every checkpoint name: shape, sharding, bytes, FLOPs to recompute",
        ("llama_8b h200:8", "tiny --json=names.json"),
    ),
    "validate": (
        "train.commands.validate_command",
        "predicted seconds and bytes against what real GPUs measured",
        ("--set=playbook --gpus=8 --html=validate.html", "--set=playbook --only=tp2 --rates=rates.json"),
    ),
    "calibrate": (
        "memory.commands.calibrate_command",
        "what this machine's devices reach, for --rates=FILE",
        ("--out=rates.json", "--seconds=20"),
    ),
    "trace": (
        "memory.commands.trace_command",
        "where a step's time went, from a profiler's trace",
        ("runs/tiny/profile --html=trace.html", "runs/tiny/profile --report=runs/tiny/memory.json"),
    ),
    "page": (
        "train.commands.page_command",
        "a run directory as a page: loss, memory, report, trace",
        ("runs/tiny", "runs/tiny runs/other --html=both.html"),
    ),
    "diff": (
        "memory.commands.diff_command",
        "what grew or shrank between two reports' JSON files",
        ("before.json after.json --html=diff.html", "before.json after.json --fail-above=2"),
    ),
    "configs": ("memory.commands.listings", "the shipped configs, a line each", ("", "--grep=llama")),
    "targets": (
        "memory.commands.listings",
        "what programs can be compiled for, with memory and rates",
        ("", "--grep=H100"),
    ),
    "keys": ("memory.commands.listings", "every config key with its default and meaning", ("", "--grep=remat")),
    "policies": ("memory.commands.listings", "every remat policy and what it keeps", ("", "--grep=offload")),
}
EXIT_CODES = """\
exit codes: 0 done, 1 a check you asked for failed, 2 a mistake in the command
or its files, 3 does not fit, 130 stopped by Ctrl-C"""
# Examples in a help go on in the next line after so many columns.
HELP_WIDTH = 80
# Started by the pool of a search: a worker of its own, not a command for people.
WORKER = "worker"


def parser(command: str) -> Parser:
    """The parser of one command."""
    module, summary, examples = COMMANDS[command]
    lines = [line for example in examples for line in broken(f"bytescope {command} {example}".rstrip(), HELP_WIDTH, 2)]
    shown = "\n".join(lines)
    out = Parser(
        prog=f"bytescope {command}",
        description=summary,
        epilog=f"examples:\n{shown}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.set_defaults(command=command)
    importlib.import_module(f"bytescope.{module}").add_arguments(out)
    return out


def parse(argv: Sequence[str], trainer: Trainer) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """(arguments, config overrides) of a command line; nothing runs.

    Raises:
      ReportError: an unknown command, with the nearest one; arguments that it does not take.
    """
    command = argv[0] if argv else ""
    if command not in COMMANDS:
        raise ReportError(f"{unknown(command, COMMANDS)}; see bytescope --help")
    rest, overrides = list(argv[1:]), []
    if any(argument.lstrip("-").startswith("config.") for argument in rest):
        rest, overrides = trainer.split_overrides(rest)
    command_parser = parser(command)
    command_parser.keys_named = trainer.keys_named
    args = command_parser.parse_intermixed_args(rest)  # options may stand between config and target
    settle_subject(args)
    return args, overrides


def unknown(command: str, commands: Sequence[str]) -> str:
    """What to say of a command that does not exist."""
    if not command or command.startswith("-"):
        return f"no command: give one of {', '.join(commands)}"
    return f"unknown command {command!r}: {did_you_mean(command, commands) or 'of ' + ', '.join(commands)}"


def main(argv: Sequence[str], trainer: Trainer | None = None) -> int:
    """Runs a command line; returns the exit code. Without a `trainer` that of this repository is asked."""
    if trainer is None:
        from bytescope.train.plan.adapter import Adapter

        trainer = Adapter()
    if list(argv) == [WORKER]:
        from bytescope.memory.compare import worker

        worker.main(trainer)
        return 0
    settle_stdout()
    try:
        args, overrides = parse(argv, trainer)
        module = importlib.import_module(f"bytescope.{COMMANDS[args.command][0]}")
        with chosen_rates(args):
            return module.run(args, overrides, trainer)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:  # ReportError, the trainer's errors with exit codes of their own, files
        if (code := exit_code_of(error)) is None:
            raise
        return code


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(f"usage: python -m bytescope.memory COMMAND ...: one of {', '.join(COMMANDS)}; see bytescope --help")
        sys.exit(0)
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
