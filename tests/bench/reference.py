"""Writes the reference pages from the code: commands and their flags, config keys, targets, fields of the report.

    python tests/bench/reference.py            # write the pages
    python tests/bench/reference.py --check    # exit with 1 and name the pages that are not what the code says

A quick test (tests/end_to_end/test_readmes.py) runs the check. The pages do not depend on the Python version: flags are
read from the parsers, not from their formatted help.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_schemas import FitResult, FrontResult, LeversResult

from bytescope.memory.commands.budgets import CheckResult
from bytescope.memory.commands.names_program import SavableValues
from bytescope.memory.commands.report_command import ReportResult
from bytescope.memory.commands.trace_command import TraceResult
from bytescope.memory.compare.compare_rows import CompareResult
from bytescope.memory.formulas.memory_estimate import EstimateResult
from bytescope.memory.messages.explanation_record import ExplanationRecord
from bytescope.memory.records.audit_record import AuditResult
from bytescope.memory.records.report_diff import DiffResult
from bytescope.memory.records.result import descriptions, json_keys, schema
from bytescope.memory.records.result_envelope import ENVELOPE_SCHEMA, ResultEnvelope
from bytescope.train.commands.list_command import Configs, Keys, Policies, Targets
from bytescope.train.commands.names_config import NamedTensors
from bytescope.train.commands.score_command import ScoreResult
from bytescope.train.generate.budget import GenerationReport
from bytescope.train.quantize.quantize_result import QuantizationResult
from bytescope.train.run.run_correction import CalibrateResult

ROOT = Path(__file__).resolve().parents[2]
HEADER = "<!-- Written by tests/bench/reference.py: change the code, then run it. -->\n"


# Command -> the record of its result.
RESULTS: Mapping[str, Any] = {
    "report": ReportResult | GenerationReport,
    "explain": ExplanationRecord,
    "diff": DiffResult,
    "audit": AuditResult,
    "check": CheckResult,
    "names": NamedTensors | SavableValues,
    "trace": TraceResult,
    "compare": CompareResult,
    "levers": LeversResult,
    "front": FrontResult,
    "fit": FitResult,
    "estimate": EstimateResult,
    "calibrate": CalibrateResult,
    "quantize": QuantizationResult,
    "score": ScoreResult,
    "configs": Configs,
    "keys": Keys,
    "policies": Policies,
    "targets": Targets,
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not current")
    args = parser.parse_args(argv)
    if args.check:
        stale = stale_pages()
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current: run python tests/bench/reference.py", file=sys.stderr)
        return 1 if stale else 0
    for path, write in PAGES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(write(), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def stale_pages() -> list[Path]:
    """The pages whose text differs from what the code says, missing ones included."""
    return [path for path, write in PAGES.items() if not path.is_file() or path.read_text(encoding="utf-8") != write()]


# ---- commands


def commands_page() -> str:
    """Every command with its arguments, from the parsers."""
    from bytescope.memory.commands.registry import COMMANDS, GROUPS, call_of

    lines = [
        "# Commands",
        "",
        "The first word is the subject, such as a config. Words `KEY=VALUE` after it change config keys",
        "([keys](keys.md)): `bytescope train tiny batch.micro=4`. All commands exit with 0",
        "when they are done, 1 if a check that you asked for failed, 2 for a mistake in the command, config or data,",
        "3 if the program does not fit, 130 after Ctrl-C.",
        "",
    ]
    for group, names in GROUPS.items():
        links = ", ".join(f"[{name}](#{name})" for name in names)
        lines.append(f"- **{group}**: {links}")
    for name, command in COMMANDS.items():
        rows = rows_of(name)
        lines += ["", f"## {command.part_of or name}", "", f"{sentence(command.summary)}", ""]
        if command.part_of:
            base = command.part_of.partition(" ")[0]
            shared = [row for row in rows if row in rows_of(base)]
            rows = [row for row in rows if row not in shared]
            if shared:
                lines += [f"Arguments as of {base}: {', '.join(name for name, _ in shared)}.", ""]
        if rows:
            lines += table(("argument", "meaning"), rows)
        else:
            lines.append("No arguments.")
        if command.examples:
            examples = [call_of(name, example) for example in command.examples]
            lines += ["", "```", *examples, "```"]
    lines += ["", "# JSON", "", *json_section()]
    return HEADER + "\n".join(lines) + "\n"


def rows_of(name: str) -> list[tuple[str, str]]:
    """The arguments of a command with their meaning."""
    from bytescope.memory.commands.registry import make_parser

    shown = (
        action
        for action in make_parser(name)._actions
        if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS
    )
    return [(f"`{argument_name(action)}`", argument_help(action)) for action in shown]


def json_section() -> list[str]:
    """The keys that the JSON of all commands has, and a link to the JSON Schema of each command."""
    rows = descriptions(ResultEnvelope).items()
    links = ", ".join(f"[{name}](schemas/{name}.json)" for name in RESULTS)
    return [
        "`--json=FILE` writes an object with these keys. With `--json=-` it is alone on standard output. Files of",
        "schema 1, which have only the keys of `result`, are still read.",
        "",
        *table(("key", "meaning"), [(f"`{name}`", meaning) for name, meaning in rows]),
        "",
        f"JSON Schemas: {links}.",
    ]


def schema_file(command: str) -> str:
    """The JSON Schema of what a command writes with --json."""
    envelope = schema(ResultEnvelope)
    envelope["properties"] |= {
        "schema": {"const": ENVELOPE_SCHEMA},
        "command": {"const": command},
        "result": schema(RESULTS[command]),
    }
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"bytescope {command} --json",
    }
    return json.dumps(about | envelope, separators=(",", ":")) + "\n"


def argument_name(action: argparse.Action) -> str:
    """A flag with its value, or a positional argument, as the usage line writes it."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return f"[{value}]" if action.nargs == "?" else value
    flag = action.option_strings[-1]
    return f"{flag}={value}" if value else flag


def argument_help(action: argparse.Action) -> str:
    """The help of an argument, with its default where the help names it by %(default)s."""
    text = action.help or ""
    values = {"default": action.default, "prog": "bytescope", "metavar": action.metavar}
    return text % values if "%(" in text else text.replace("%%", "%")


# ---- keys, targets


def keys_page() -> str:
    """Every config key with its default and meaning, by group."""
    from bytescope.train.program.config_files import describe_keys

    groups: dict[str, list[tuple[str, str, str]]] = {}
    for key, default, meaning in describe_keys():
        groups.setdefault(key.partition(".")[0], []).append((f"`{key}`", f"`{default}`" if default else "", meaning))
    lines = [
        "# Config keys",
        "",
        "Every key of [configs/base.py](../../configs/base.py). `KEY=VALUE` after the config changes one on the",
        "command line, as does `--config.KEY=VALUE`; `bytescope list keys --grep=WORD` prints the keys that mention a",
        "word.",
    ]
    for group, rows in groups.items():
        lines += ["", f"## {group}", "", *table(("key", "default", "meaning"), rows)]
    return HEADER + "\n".join(lines) + "\n"


def targets_page() -> str:
    """Every target with its memory and rates."""
    from bytescope.memory.watching import device_tables

    targets = device_tables.targets()
    lines = [
        "# Targets",
        "",
        "What a program can be compiled for. `h100:8` is eight GPUs of one host, `h100:2x8` two hosts with eight GPUs",
        "each, `v5e:4x4` a TPU slice of 4 x 4 chips. NVIDIA GPUs need the `cuda` extra, AMD GPUs the `rocm` extra,",
        "TPUs the `tpu` extra. Memory in GiB (2**30 bytes) and TB/s are of one device. Sources of all figures:",
        "[devices/chips.py](../devices/chips.py).",
        "",
        *table([column.title for column in targets.columns], targets.cells()),
    ]
    return HEADER + "\n".join(lines) + "\n"


# ---- fields of the report


def report_page() -> str:
    """Every key of a report's JSON, from the docstrings of its records."""
    from bytescope.memory.records import buffer_records, parallel_records, report_record
    from bytescope.memory.records.buffer_records import PeakAccount

    record = report_record.ReportRecord
    keys = [(f"`{name}`", descriptions(record)[name]) for name in json_keys(record)]
    lines = [
        "# Fields of a report",
        "",
        "`report.save(FILE)` and `memory.json` of a run have these keys, schema 1. `bytescope report --json=FILE`",
        "writes them under `result` ([JSON of commands](../../train/reference/commands.md#json)). `memory.load(FILE)`",
        "reads both. A `Report` has an attribute of the same name for each. All sizes are bytes on one device.",
        "",
        *table(("key", "meaning"), keys),
    ]
    for module in (report_record, buffer_records, parallel_records):
        for name, record in vars(module).items():
            own = dataclasses.is_dataclass(record) and record.__module__ == module.__name__
            if not own or issubclass(record, PeakAccount):
                continue
            meaning, *_ = re.split(r"\n+(?:Fields|Attributes)\b", inspect.cleandoc(record.__doc__ or ""))
            rows = [(f"`{key}`", text) for key, text in descriptions(record).items()]
            lines += ["", f"## {name}", "", meaning, "", *table(("key", "meaning"), rows)]
    return HEADER + "\n".join(lines) + "\n"


# ---- Markdown


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; a bar inside a cell is escaped."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for row in rows:
        cells = [re.sub(r"\s+", " ", cell).replace("|", "\\|").strip() for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def sentence(text: str) -> str:
    """A summary as a sentence."""
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."


PAGES: Mapping[Path, Callable[[], str]] = {
    ROOT / "train" / "reference" / "commands.md": commands_page,
    ROOT / "train" / "reference" / "keys.md": keys_page,
    ROOT / "memory" / "reference" / "targets.md": targets_page,
    ROOT / "memory" / "reference" / "report_json.md": report_page,
    **{
        ROOT / "train" / "reference" / "schemas" / f"{name}.json": functools.partial(schema_file, name)
        for name in RESULTS
    },
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
