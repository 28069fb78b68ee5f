"""bytescope report: one program's report, on the terminal and as JSON, HTML or for other viewers."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import NO_CONFIG, add_subject
from bytescope.memory.errors import ReportError

if TYPE_CHECKING:
    from bytescope.memory.plan.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_subject(parser, "override a config key")
    parser.add_argument("--hlo", metavar="FILE", help="instead of a config: XLA's dump of any program "
                        "(*after_optimizations.hlo.pb)")
    parser.add_argument("--formulas", action="store_true",
                        help="what the published formulas say beside the compiler, with the gap (needs --config)")
    parser.add_argument("--run", action="store_true", help="the other programs of a run too: what init, evaluation and "
                        "the sample at its end come to with the state (needs --config; compiles them)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report's JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that opens offline")
    parser.add_argument("--export", metavar="DIR", type=Path,
                        help="write what XProf, TensorBoard and pprof open")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the report and writes the files that were asked for; the trainer compiles a config's step."""
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform, simulate_devices

    if bool(args.hlo) == bool(args.config):
        raise ReportError("give either a config or --hlo" if args.hlo else f"{NO_CONFIG}, or a program as --hlo=FILE")
    if args.hlo and overrides:
        raise ReportError(f"--config.{overrides[0][0]} has no config to change: give --config, not --hlo")
    if args.hlo and args.formulas:
        raise ReportError("--formulas takes its shapes from a config: give --config, not --hlo")
    if args.hlo and args.run:
        raise ReportError("--run compiles the other programs of a config: give --config, not --hlo")
    choose_platform()  # before jax is imported
    simulate_devices([args.target])
    target = targets.parse(args.target)
    program, config, settled = None, None, {}
    if args.config:
        program = trainer.program(args.config, overrides, target)
        compilation, config = program.compile_for_report(exact=True), trainer.config(args.config, overrides)
        settled = trainer.settled(program)
    else:
        compilation = _of_file(args.hlo)

    from bytescope.memory.analyze import report_of

    known = {"names": trainer.vocabulary(), "loop": trainer.loop_overhead(program)} if program else {}
    report = report_of(compilation, target=target, config=config, **known)
    from bytescope.memory.costs import roofline
    from bytescope.memory.text import report as report_text

    predicted = roofline.of_answer({"work": report.work, "target": report.target})
    report = dataclasses.replace(report, roofline=predicted.to_json() if predicted else {})
    if program:
        print(trainer.choices(program))
    report_text.show(report, batch=settled.get("batch", ""))
    found = _formulas(report, config, settled, compilation.jaxpr) if args.formulas else {}
    found |= {"run": _run(report, trainer.run_peaks(program))} if args.run else {}
    _write(args, report, compilation.proto, ({"batch": settled["batch"]} if settled else {}) | found)
    return 0


def _formulas(report: Any, config: Mapping[str, Any], settled: Mapping[str, Any], jaxpr: Any) -> dict[str, Any]:
    """Prints the formulas beside the report; {"formula": their figures}, what the JSON holds besides."""
    from bytescope.memory.costs import flops
    from bytescope.memory.formulas import reconcile
    from bytescope.memory.text import formulas as formulas_text

    found = reconcile.formula_of(config, settled, report.target.get("platform", ""))
    if isinstance(found, str):
        print(f"\nno formula: {found}")
        return {"formula": None}
    counted = flops.count(jaxpr)
    formulas_text.show_report(found, reconcile.lines(found, report.peak_bytes, report.breakdown, {
        "model_flops": counted.model_flops, "hardware_flops": counted.hardware_flops}, report.host_bytes))
    return {"formula": dataclasses.asdict(found)}


def _run(report: Any, others: Mapping[str, int]) -> dict[str, int]:
    """Prints what each program of a run comes to and the most; {program: bytes}."""
    from bytescope.memory.units import human

    sizes = {"step": report.predicted_bytes, **others}
    most = max(sizes, key=sizes.__getitem__)
    parts = ", ".join(f"{name} {human(size)}" for name, size in sizes.items())
    print(f"a run's programs, with the state: {parts}; the peak is the {most}'s")
    return sizes


def _of_file(path: str) -> Any:
    from bytescope.memory.analyze import compilation_of

    return compilation_of(path)


def _write(args: argparse.Namespace, report: Any, proto: bytes, besides: Mapping[str, Any]) -> None:
    """Writes the files that were asked for; `besides` are keys that a report's reader passes over."""
    try:
        if args.json:
            args.json.write_text(json.dumps({**report.to_json(), **besides}, indent=1) + "\n", encoding="utf-8")
        if args.html:
            from bytescope.memory.pages import report as report_page

            args.html.write_text(report_page.render(report), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write {error.filename}: {error.strerror}") from error
    if args.export:
        from bytescope.memory.commands.xprof_export import export

        export(args.export, report, proto)
