"""python -m memory report: one program's report, on the terminal and as JSON, HTML or for other viewers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memory.errors import ReportError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE", help="a config file or shipped name: the trainer's step")
    source.add_argument("--hlo", metavar="FILE", help="XLA dump of a program (*after_optimizations.hlo.pb)")
    parser.add_argument("--config.KEY", dest="unused", metavar="VALUE", help="override a config key")
    parser.add_argument("--target", metavar="T", default="local", help="what to compile for and judge by: "
                        "local, cpu:8, h200:8, h100:2x8, v5e:4x4 ... (default: local)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report's JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that opens offline")
    parser.add_argument("--export", metavar="DIR", type=Path,
                        help="write what XProf, TensorBoard and pprof open")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]],
        trainer: Callable[..., tuple[Any, dict[str, Any]]]) -> int:
    """Prints the report and writes the files that were asked for; `trainer` compiles a config's step."""
    from memory import targets
    from memory.platform import choose_platform, simulate_devices

    if args.hlo and overrides:
        raise ReportError(f"--config.{overrides[0][0]} has no config to change: give --config, not --hlo")
    choose_platform()  # before jax is imported
    simulate_devices([args.target])
    target = targets.parse(args.target)
    if args.config:
        compilation, config = trainer(args.config, overrides, target)
    else:
        compilation, config = _of_file(args.hlo), None

    from memory.analyze import report_of

    report = report_of(compilation, target=target, config=config)
    from memory import text

    text.show(report)
    _write(args, report, compilation.proto)
    return 0


def _of_file(path: str) -> Any:
    from memory.analyze import compilation_of

    return compilation_of(path)


def _write(args: argparse.Namespace, report: Any, proto: bytes) -> None:
    try:
        if args.json:
            report.save(args.json)
        if args.html:
            from memory import html

            args.html.write_text(html.render(report), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write {error.filename}: {error.strerror}") from error
    if args.export:
        from memory.export import export

        export(args.export, report, proto)
