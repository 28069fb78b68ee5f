"""Every subcommand of `bytescope`: its module, its group in the overview, what it does, and examples for its help.

A module has `add_arguments(parser)` and `run(args) -> exit code`. One with a parser of its own has `make_parser()`
instead, and one that checks its arguments together has `parse(argv)`; config overrides are `args.overrides`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType

from bytescope.memory.commands.arguments import Parser
from bytescope.memory.errors import ReportError, did_you_mean
from bytescope.memory.view.text_layout import wrap_command
from bytescope.train.program.config_files import keys_named, split_overrides
from bytescope.train.user_errors import UserError

# Examples in a help go on in the next line after so many columns.
HELP_WIDTH = 80
EXIT_CODES = """\
exit codes: 0 done, 1 a check you asked for failed, 2 a mistake in the command
or its files, 3 does not fit, 130 stopped by Ctrl-C"""


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """One row of COMMANDS.

    Fields:
        module: of its functions, under `bytescope`; imported when it is needed, since some import jax.
        group: a line of the overview. summary: what it does.
        examples: arguments, for a module without a parser of its own.
        reads: what it reads in the place of a config, as the error for --config.KEY says it; "" if it takes configs.
    """

    module: str
    group: str
    summary: str
    examples: tuple[str, ...] = ()
    reads: str = ""

    def load(self) -> ModuleType:
        """The module, imported."""
        return importlib.import_module(f"bytescope.{self.module}")


COMMANDS: Mapping[str, Subcommand] = {
    "train": Subcommand(
        "train.commands.train_command", "train", "train a transformer, its memory known before the first step"
    ),
    "prepare": Subcommand("train.data.prepare", "train", "turn text into token shards, which train reads fast"),
    "generate": Subcommand(
        "train.commands.generate_command", "train", "text from a run or a folder of weights, with a paged cache"
    ),
    "score": Subcommand(
        "train.commands.score_command",
        "train",
        "log-probabilities and perplexity of texts under a run or a folder",
    ),
    "quantize": Subcommand(
        "train.commands.quantize_command", "train", "write a model in 4 bits with scales that a text asks for (AWQ)"
    ),
    "export": Subcommand(
        "train.commands.export_command", "train", "write the model of a run as a folder that transformers loads"
    ),
    "report": Subcommand(
        "train.commands.report_config",
        "measure",
        "peak, composition, timeline and findings of one program",
        (
            "llama_8b h200:8 --html=report.html",
            "--program=my_package.train:program h100:8",
            "--hlo=step.after_optimizations.hlo.pb --json=a.json",
        ),
    ),
    "trace": Subcommand(
        "memory.commands.trace_command",
        "measure",
        "where a step's time went, from a profiler's trace",
        ("runs/tiny/profile --html=trace.html", "runs/tiny/profile --report=runs/tiny/memory.json"),
        reads="reads a trace",
    ),
    "page": Subcommand(
        "train.commands.page_command",
        "measure",
        "a run directory as a page: loss, memory, report, trace",
        ("runs/tiny", "runs/tiny runs/other --html=both.html"),
        reads="reads a run directory",
    ),
    "names": Subcommand(
        "train.commands.names_command",
        "measure",
        "every checkpoint name: shape, sharding, bytes, FLOPs to recompute",
        ("llama_8b h200:8", "tiny --json=names.json"),
    ),
    "diff": Subcommand(
        "memory.commands.diff_command",
        "measure",
        "what grew or shrank between two reports' JSON files",
        ("before.json after.json --html=diff.html", "before.json after.json --fail-above=2"),
        reads="reads two JSON files",
    ),
    "estimate": Subcommand(
        "train.commands.estimate_command",
        "measure",
        "bytes and FLOPs by formula, at once; a page with inputs",
        ("--params=7e9", "llama_8b --zero=3 --data=8 --html=estimate.html"),
    ),
    "calibrate": Subcommand(
        "memory.commands.calibrate_command",
        "measure",
        "what this machine's devices reach, for --rates=FILE",
        ("--out=rates.json", "--seconds=20"),
        reads="measures devices",
    ),
    "validate": Subcommand(
        "train.commands.validate_command",
        "measure",
        "predicted seconds and bytes against what real GPUs measured",
        ("--set=playbook --gpus=8 --html=validate.html", "--set=playbook --only=tp2 --rates=rates.json"),
    ),
    "compare": Subcommand(
        "train.commands.compare_configs",
        "plan",
        "remat policies, or any keys of a config, against each other",
        (
            "llama_8b h200:8 --remat=none,full,dots --html=c.html",
            "--grid=config=llama_8b,llama_70b --grid=data.seq_len=1024,4096 --remat=none,full --target=h100:8",
            "--program=my_package.train:program --grid=width=256,512 h100:8",
        ),
    ),
    "levers": Subcommand(
        "train.commands.levers_command",
        "plan",
        "what each memory saving saves and costs, one after the other",
        ("llama_8b h200 --html=levers.html", "llama_8b rtx4090 --savings=bf16,full,offload"),
    ),
    "front": Subcommand(
        "train.commands.front_command",
        "plan",
        "at each of ten budgets the least recomputation that fits",
        ("llama_8b h100:8 --html=front.html", "llama_8b h100:8 --to=42GiB --cost=flops --auto-offload"),
    ),
    "fit": Subcommand(
        "train.commands.fit_command",
        "plan",
        "from a budget to the fastest configuration that fits it",
        ("llama_8b h100:8 --batch-tokens=4194304", "llama_8b rtx4090 --budget=20GiB --levers=remat,micro"),
    ),
    "pipeline": Subcommand(
        "train.commands.pipeline_command",
        "plan",
        "the schedules of a pipeline: ticks, bubble, stash by stage",
        ("--stages=8 --micro-batches=32", "--stages=4 --micro-batches=8 --schedule=1f1b --html=pipeline.html"),
        reads="reads no config",
    ),
    "configs": Subcommand(
        "train.commands.listings",
        "list",
        "the shipped configs, a line each",
        ("", "--grep=llama"),
        reads="reads no config",
    ),
    "targets": Subcommand(
        "memory.commands.targets_command",
        "list",
        "what programs can be compiled for, with memory and rates",
        ("", "--grep=H100"),
        reads="reads no config",
    ),
    "keys": Subcommand(
        "train.commands.listings",
        "list",
        "every config key with its default and meaning",
        ("", "--grep=remat"),
        reads="reads no config",
    ),
    "policies": Subcommand(
        "train.commands.listings",
        "list",
        "every remat policy and what it keeps",
        ("", "--grep=offload"),
        reads="reads no config",
    ),
    "completion": Subcommand(
        "train.commands.completion_command", "list", "print a script that completes commands in bash, zsh or fish"
    ),
}
GROUPS: Mapping[str, list[str]] = {
    group: [name for name, command in COMMANDS.items() if command.group == group]
    for group in dict.fromkeys(command.group for command in COMMANDS.values())
}


def make_parser(name: str) -> Parser:
    """The parser of one command."""
    command = COMMANDS[name]
    module = command.load()
    if hasattr(module, "make_parser"):
        return module.make_parser()
    lines = [
        line
        for example in command.examples
        for line in wrap_command(f"bytescope {name} {example}".rstrip(), HELP_WIDTH, 2)
    ]
    shown = "\n".join(lines)
    parser = Parser(
        prog=f"bytescope {name}",
        description=command.summary,
        epilog=f"examples:\n{shown}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of any command line, read and checked as when it runs, without running it; its `command` and
    `overrides` among them.

    Raises:
      ValueError: an unknown command or argument; it has an `exit_code`.
    """
    name, *rest = argv or [""]
    if name not in COMMANDS:
        raise UserError(f"{_unknown(name)}; see bytescope --help")
    module = COMMANDS[name].load()
    if hasattr(module, "parse"):
        args = module.parse(rest)
    else:
        args = _parse(name, rest)
    args.command = name
    return args


def _parse(name: str, argv: list[str]) -> argparse.Namespace:
    """The arguments of a command whose module does not parse them itself."""
    from bytescope.train.commands.config_arguments import settle_subject

    overrides: list[tuple[str, str]] = []
    own_parser = hasattr(COMMANDS[name].load(), "make_parser")
    if not own_parser and any(argument.lstrip("-").startswith("config.") for argument in argv):
        argv, overrides = split_overrides(argv)
    parser = make_parser(name)
    parser.keys_named = keys_named
    args = parser.parse_intermixed_args(argv)  # options may stand between config and target
    settle_subject(args)
    args.overrides = overrides
    if overrides and (reads := COMMANDS[name].reads):
        raise ReportError(f"{name} takes no --config.{overrides[0][0]}: it {reads}")
    return args


def _unknown(name: str) -> str:
    """What to say of a command that does not exist."""
    if not name or name.startswith("-"):
        return f"no command: give one of {', '.join(COMMANDS)}"
    return f"unknown command {name!r}: {did_you_mean(name, COMMANDS) or 'of ' + ', '.join(COMMANDS)}"
