"""The table of subcommands of `bytescope`: module, group in the overview, summary and examples of each command.

Modules are named as text and imported when a command needs them, so that this table may name modules of `train`.

A module has `add_arguments(parser)` and `run(args) -> exit code`. A module that builds its own parser has
`make_parser()` instead of `add_arguments`. A module that checks its arguments itself also has `parse(argv)`. Config
overrides are in `args.overrides`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
from collections.abc import Mapping, Sequence
from types import ModuleType

from bytescope.memory.commands.arguments import HELP_WIDTH, Parser
from bytescope.memory.commands.moved import moved_command
from bytescope.memory.errors import ReportError, did_you_mean
from bytescope.memory.subjects.opening import load_subjects
from bytescope.memory.view.text_layout import wrap_command

# Columns after which examples in help texts continue on the next line.
EXIT_CODES = """\
exit codes: 0 done, 1 a check you asked for failed, 2 a mistake in the command
or its files, 3 does not fit, 130 stopped by Ctrl-C"""


# Flag that a command does not have -> what to give instead.
ELSEWHERE: Mapping[str, str] = {
    "--budget": "bytescope fit --budget=SIZE searches within a budget, and bytescope check compares programs with a "
    "limit of your own",
}


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """A subcommand of `bytescope`.

    Attributes:
        module: path of the command's module below `bytescope`. The module is imported only when needed, since some
          import jax.
        group: the key in HEADINGS of the group in the overview `bytescope --help`.
        summary: what the command does, in one line.
        examples: arguments of example calls, used if the module has no parser of its own.
        reads: what a command without a config reads, such as "reads a trace"; "" for a command with a config. It is
          part of the error message about --config.KEY=VALUE.
        part_of: for an ability of another command, how it is called, such as "report --names". The last word is the
          flag that selects it, or a placeholder if the subject does.
        is_tool: whether other programs run the command, such as a shell. The overview then names it below the groups.
    """

    module: str
    group: str
    summary: str
    examples: tuple[str, ...] = ()
    reads: str = ""
    part_of: str = ""
    is_tool: bool = False

    @property
    def flag(self) -> str:
        """The flag that selects this ability of another command, such as "--names"; "" if the subject selects it."""
        word = self.part_of.rpartition(" ")[2]
        return word if word.startswith("--") else ""

    def load(self) -> ModuleType:
        return importlib.import_module(f"bytescope.{self.module}")


COMMANDS: Mapping[str, Subcommand] = {
    "train": Subcommand(
        "train.commands.train_command", "train", "train a transformer and show its memory before the first step"
    ),
    "prepare": Subcommand("train.data.prepare", "train", "tokenize text into shards that bytescope train reads"),
    "generate": Subcommand(
        "train.commands.generate_command", "train", "generate text from a run or a folder of weights"
    ),
    "score": Subcommand(
        "train.commands.score_command",
        "train",
        "compute log-probabilities and perplexity of texts",
        part_of="generate --score",
    ),
    "quantize": Subcommand(
        "train.commands.quantize_command",
        "train",
        "write 4-bit weights, calibrated on a text (AWQ)",
        part_of="export --awq",
    ),
    "export": Subcommand(
        "train.commands.export_command", "train", "write a run's model as a folder that transformers loads"
    ),
    "report": Subcommand(
        "train.commands.report_config",
        "measure",
        "report what uses memory in a program",
        (
            "llama_8b h200:8 --html=report.html",
            "my_package.train:program h100:8",
            "step.after_optimizations.hlo.pb --json=a.json",
            "maxtext:llama2-7b h100:8 per_device_batch_size=2 remat_policy=full",
        ),
    ),
    "init-program": Subcommand(
        "memory.commands.init_command",
        "measure",
        "report on the training step of a script, without its data",
        reads="reads a script",
        part_of="report SCRIPT",
    ),
    "explain": Subcommand(
        "train.commands.explain_command",
        "measure",
        "explain an out-of-memory message in a log: cause and fix",
        (
            "job.log",
            "job.log --html=explained.html",
            "job.log runs/tiny",
            "- llama_8b h100:8 --json=-",
            "-- python -m my_package.train",
        ),
    ),
    "mcp": Subcommand(
        "memory.commands.mcp_command",
        "measure",
        "serve report, explain, compare and fit to agents (an MCP server)",
        ("", "--skill"),
        reads="takes the config in each call",
        is_tool=True,
    ),
    "trace": Subcommand(
        "memory.commands.trace_command",
        "measure",
        "show where a step's time went, from a profiler trace",
        ("runs/tiny --trace=runs/tiny/profile", "report.json --trace=profile"),
        reads="reads a trace",
        part_of="report --trace",
    ),
    "saved": Subcommand(
        "train.commands.saved_command",
        "measure",
        "show a run directory or a saved report",
        ("runs/tiny --html=run.html", "report.json"),
        reads="reads a run directory or a saved report",
        part_of="report RUN",
    ),
    "names": Subcommand(
        "train.commands.names_command",
        "measure",
        "list the tensors that remat policies can save, with bytes",
        ("llama_8b h200:8", "my_package.train:loss h200:8 --json=names.json"),
        part_of="report --names",
    ),
    "diff": Subcommand(
        "memory.commands.diff_command",
        "measure",
        "compare two memory reports, given as JSON files",
        ("before.json after.json", "before.json after.json --fail-above=2"),
        reads="reads two JSON files",
    ),
    "audit": Subcommand(
        "train.commands.audit_command",
        "measure",
        "check that each checkpoint, offload and donation was honored",
        (
            "llama_8b h100:8 --strict",
            "my_package.train:program h100:8 --json=audit.json",
            "step.after_optimizations.hlo.pb",
            "maxtext:llama2-7b h100:8 remat_policy=minimal",
        ),
        part_of="report --audit",
    ),
    "check": Subcommand(
        "memory.commands.check_command",
        "measure",
        "check programs against their memory budgets in pyproject.toml",
        ("", "train_step --update-baseline", "--baseline=before.json --github"),
        reads="reads the programs and configs that pyproject.toml names",
    ),
    "estimate": Subcommand(
        "train.commands.estimate_command",
        "measure",
        "estimate memory and FLOPs with formulas, without compiling",
        ("gpt:7e9", "llama_8b h100:8 batch.micro=2 --html=estimate.html", "llama_8b --stages=4 --micro-batches=16"),
    ),
    "calibrate": Subcommand(
        "train.commands.calibrate_runs",
        "machine",
        "measure device speeds, or correct predictions by your own runs",
        ("--out=rates.json", "--seconds=20", "--runs=runs.csv", "--runs=runs/tiny,runs/other --out=rates.json"),
        reads="measures devices",
    ),
    "compare": Subcommand(
        "train.commands.compare_configs",
        "plan",
        "compare memory and time of policies or config values",
        (
            "llama_8b h200:8 --remat=none,full,dots --html=c.html",
            "llama_8b h100:8 --grid=config=llama_8b,llama_70b --grid=data.seq_len=1024,4096 --remat=none,full",
            "my_package.train:program --grid=width=256,512 h100:8",
            "maxtext:llama3-8b h100:8 per_device_batch_size=1 --remat=all",
        ),
    ),
    "levers": Subcommand(
        "train.commands.levers_command",
        "plan",
        "show the bytes saved and time lost by each memory saving",
        ("llama_8b h200 --html=levers.html", "llama_8b rtx4090 --savings=bf16,full,offload"),
        part_of="compare --levers",
    ),
    "front": Subcommand(
        "train.commands.front_command",
        "plan",
        "find the remat plan with the least cost per memory budget",
        ("llama_8b h100:8 --budgets=10 --html=f.html", "llama_8b h100:8 --budgets=4 --to=42GiB --auto-offload"),
        part_of="fit --budgets",
    ),
    "fit": Subcommand(
        "train.commands.fit_command",
        "plan",
        "find the fastest configuration that fits a budget",
        (
            "llama_8b h100:8 --batch-tokens=4194304",
            "llama_8b rtx4090 --budget=20GiB --vary=remat,micro",
            "my_package.train:program h100:8 --budget=60GiB",
            "maxtext:llama3-8b h100:8 max_target_length=8192",
        ),
    ),
    "list": Subcommand(
        "train.commands.list_command",
        "machine",
        "list configs, targets, keys and policies",
        ("configs", "targets --grep=H100"),
        reads="reads no config",
    ),
}
FLAGS = ("--help", "--version")  # without a command
TOOLS = tuple(name for name, command in COMMANDS.items() if command.is_tool)  # run by other programs
# Group -> its heading in the overview.
HEADINGS: Mapping[str, str] = {
    "measure": "see what uses memory",
    "plan": "choose what fits",
    "train": "train and use a model",
    "machine": "look up and set up",
}
# Heading -> the commands below it.
GROUPS: Mapping[str, list[str]] = {
    heading: [
        name
        for name, command in COMMANDS.items()
        if command.group == group and not (command.part_of or command.is_tool)
    ]
    for group, heading in HEADINGS.items()
}


def spelling_of(name: str) -> str:
    """Returns how the row `name` of COMMANDS is called, such as "report --names"."""
    return COMMANDS[name].part_of or name


def call_of(name: str, arguments: str) -> str:
    """Returns the command line that calls the row `name` of COMMANDS with `arguments`."""
    command = COMMANDS[name]
    flag = "" if command.flag in arguments else command.flag
    return " ".join(filter(None, ["bytescope", command.part_of.partition(" ")[0] or name, arguments, flag]))


def abilities_of(name: str) -> list[str]:
    """Returns the rows of COMMANDS that are abilities of the command `name`."""
    return [ability for ability, command in COMMANDS.items() if command.part_of.partition(" ")[0] == name]


def find_ability(name: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the row of COMMANDS that a command line runs, and its arguments.

    The row is the ability that a flag or the subject selects, or the command `name` itself. If the subject selects it,
    its prefix is removed.

    argv: the arguments after the command. Those after "--" belong to another program.
    """
    own = argv[: argv.index("--")] if "--" in argv else argv
    flags = {argument.partition("=")[0] for argument in own}
    for ability in abilities_of(name):
        if COMMANDS[ability].flag and COMMANDS[ability].flag in flags:
            return ability, ["--help"] if flags & {"-h", "--help"} else list(argv)
    if name == "report" and own and not own[0].startswith("-"):
        subjects = load_subjects()
        kind, subject = subjects.recognize(own[0])
        if (ability := subjects.class_of(kind).reported_by) != name:
            return ability, [f"{kind}:{subject}", *argv[1:]]
    return name, list(argv)


def make_parser(name: str) -> Parser:
    """Returns the argument parser of the row `name` of COMMANDS."""
    command = COMMANDS[name]
    module = command.load()
    parser = module.make_parser() if hasattr(module, "make_parser") else _parser_of(name, module)
    if command.flag and command.flag not in parser._option_string_actions:
        parser.add_argument(
            command.flag, action="store_true", help=f"{command.summary}; this page shows the arguments with this flag"
        )
    _add_abilities(parser, name)
    return parser


def _add_abilities(parser: Parser, name: str) -> None:
    """Adds the flags of a command that select another ability. Each has arguments of its own."""
    group = parser.add_argument_group("other results, each with a --help of its own")
    for ability in map(COMMANDS.__getitem__, abilities_of(name)):
        if ability.flag:
            group.add_argument(ability.flag, action="store_true", help=f"{ability.summary}: {ability.part_of} --help")


def _parser_of(name: str, module: ModuleType) -> Parser:
    command = COMMANDS[name]
    lines = [line for example in command.examples for line in wrap_command(call_of(name, example), HELP_WIDTH, 2)]
    examples = "\n".join(lines)
    parser = Parser(
        prog=f"bytescope {command.part_of if command.flag else command.part_of.partition(' ')[0] or name}",
        description=command.summary,
        epilog=f"examples:\n{examples}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.remedies = ELSEWHERE
    module.add_arguments(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks a command line without running the command. The result has `command` and `overrides`.

    Raises:
      ValueError: the command or an argument is not known; the error has the exit code as `exit_code`.
    """
    name, *rest = argv or [""]
    if name not in COMMANDS or COMMANDS[name].part_of:
        raise ReportError(moved_command(name, rest) or f"{_unknown_command_message(name)}; see bytescope --help")
    name, rest = find_ability(name, rest)
    module = COMMANDS[name].load()
    if hasattr(module, "parse"):
        args = module.parse(rest)
    else:
        args = parse_arguments(name, rest)
    args.command = name
    return args


def parse_arguments(name: str, argv: list[str]) -> argparse.Namespace:
    """Parses the arguments of the command `name` with the parser of its module. The result has `overrides`."""
    words = importlib.import_module("bytescope.train.commands.config_arguments")
    parser = make_parser(name)
    if not any(map(load_subjects().is_function, argv)):  # a function has no config
        parser.keys_named = words.suggest_keys
    args: argparse.Namespace = words.parse_words(parser, argv, spelling_of(name))
    if args.overrides and (reads := COMMANDS[name].reads):
        key = args.overrides[0][0]
        raise ReportError(f"{spelling_of(name)} takes no --config.{key}: the command {reads}; leave the flag out")
    return args


def _unknown_command_message(name: str) -> str:
    commands = [*itertools.chain.from_iterable(GROUPS.values()), *TOOLS]
    if near := did_you_mean(name, FLAGS) if name.startswith("-") else "":
        return f"unknown flag {name!r}: {near}"
    if not name or name.startswith("-"):
        return f"no command is given: give one of {', '.join(commands)}"
    return f"unknown command {name!r}: {did_you_mean(name, commands) or 'choose one of ' + ', '.join(commands)}"
