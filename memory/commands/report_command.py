"""bytescope report: the memory report of one program, on the terminal, as JSON, as a page or for other viewers."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands import github
from bytescope.memory.commands.arguments import (
    DOES_NOT_FIT,
    NO_CONFIG,
    add_rates,
    add_subject,
    check_files,
    user_path,
    write,
)
from bytescope.memory.errors import ReportError
from bytescope.train.generation import budget_arguments as pool
from bytescope.memory.program import user_program
from bytescope.memory.records.report_record import Report, Subject

if TYPE_CHECKING:
    from bytescope.memory.compare.trainer import Trainer
    from bytescope.train.generation.budget import Planned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_subject(parser)
    parser.add_argument(
        "--program",
        metavar="MODULE:FUNCTION",
        help="report on a step of your own instead of a "
        "config: a function of a module, or of path/to/file.py, that returns (step, (state, batch)), "
        "with options of jax.jit as a third, or jax.jit(step).trace(...)",
    )
    parser.add_argument(
        "--hlo",
        metavar="FILE",
        type=user_path,
        help="report on any program instead of a "
        "config: XLA's dump of it, *after_optimizations.hlo.pb, also as .gz, or the dump's "
        "folder, of which the largest program is taken",
    )
    parser.add_argument(
        "--formulas",
        action="store_true",
        help="also show what the published formulas predict, and by how much the compiler differs (needs a config)",
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="also compile the other programs of a run, which are init, "
        "evaluation and the final sample, and show their peaks (needs a config)",
    )
    parser.add_argument(
        "--generate",
        action="store_true",
        help="report on generating from the config's model in the "
        "place of training it: weights, pool of keys and values, sequences that fit",
    )
    generating = parser.add_argument_group("with --generate")
    for add in (pool.add_dtype, pool.add_weights, pool.add_devices, pool.add_pool):
        add(generating)
    parser.add_argument("--github", action="store_true", help=github.FLAG_HELP)
    add_rates(parser)
    parser.add_argument("--json", metavar="FILE", type=user_path, help="write the report as JSON")
    parser.add_argument("--html", metavar="FILE", type=user_path, help="write the report as a page that opens offline")
    parser.add_argument("--export", metavar="DIR", type=user_path, help="write files for XProf, TensorBoard and pprof")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the report and writes the files that were asked for; the trainer compiles a config's step."""
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform, simulate_devices

    _check(args, overrides)
    platform = choose_platform()  # before jax is imported
    simulate_devices([args.target])
    if args.program and platform == "cpu" and args.target.partition(":")[0] not in ("local", "cpu"):
        simulate_devices([f"cpu:{targets.parse(args.target).n_devices}"])  # for the mesh that the program makes itself
    if args.generate:
        return _generation(args, trainer.generation(args.config, overrides, targets.parse(args.target), args))
    if args.program:
        report = _of_program(args)
    else:
        target = targets.parse(args.target)
        report = _of_config(args, overrides, trainer, target) if args.config else _of_file(args, target)
    if args.github:
        github.tell(github.of_report(report))
        github.add_summary(github.summary_of_report(report))
    if report.fits is False:
        _advise(report, args, overrides)
        return DOES_NOT_FIT
    return 0


def _check(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> None:
    """Raises ReportError unless there is either a config, or a program that no flag asks for a config, and the files
    can be written."""
    check_files(args)
    given = [name for name in ("program", "hlo") if getattr(args, name) is not None]
    if given and args.config:
        raise ReportError(f"give either a config or --{given[0]}")
    if len(given) > 1:
        raise ReportError("give either --program or --hlo")
    if not given and not args.config:
        raise ReportError(f"{NO_CONFIG}, or a program as --program=MODULE:FUNCTION or --hlo=FILE")
    if given and overrides:
        raise ReportError(f"--config.{overrides[0][0]} with --{given[0]}: there is no config to change")
    pool.check(args)
    for flag, value in pool.given(args):
        if not args.generate:
            raise ReportError(f"--{flag}={value} belongs to --generate: give both, or leave it out")
    for flag in ("formulas", "run", "github", "export"):
        if args.generate and getattr(args, flag):
            raise ReportError(f"--{flag} with --generate: it is of a training step; leave one of them out")
    for flag in ("formulas", "run", "generate"):
        if given and getattr(args, flag):
            raise ReportError(f"--{flag} with --{given[0]}: it needs a config; give one in the place of --{given[0]}")
    if args.program is not None:
        user_program.split(args.program)


def _of_config(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer, target: Any) -> Report:
    """Reports on the step of a config, compiled by the trainer; the report."""
    from bytescope.memory.analysis import report_of, with_seconds

    program = trainer.program(args.config, overrides, target)
    try:
        compilation = program.compile_for_report(exact=True)
    except ValueError as error:  # the message says what to change in the config
        if hasattr(error, "exit_code"):
            raise
        raise ReportError(" ".join(str(error).split())) from error
    config, settled = trainer.config(args.config, overrides), trainer.settled(program)
    report = report_of(
        compilation, target=target, config=config, names=trainer.vocabulary(), loop=trainer.loop_overhead(program)
    )
    named = subject(args.config, overrides, program, config, settled, compilation.jaxpr)
    report = with_seconds(dataclasses.replace(report, subject=named), measure=True)
    _show(report, trainer.choices(program))
    more: dict[str, Any] = {"batch": settled["batch"]}
    if args.formulas:
        more["formula"] = _formulas(report, config, settled, compilation.jaxpr)
    if args.run:
        more["run"] = _run(report, trainer.run_peaks(program))
    _write(args, report, compilation.proto, more)
    return report


def _generation(args: argparse.Namespace, planned: Planned) -> int:
    """Shows the memory of generation, and writes it."""
    from bytescope.train.generation import budget_page, budget_text
    from bytescope.memory.view.console import put

    put(budget_text.view(planned))
    if args.json:
        reports = {name: report.to_json() for name, report in planned.reports.items()}
        write(
            args.json,
            json.dumps({"config": planned.title, **planned.budget.to_json(), "reports": reports}, indent=1) + "\n",
        )
    if args.html:
        write(args.html, budget_page.render(planned))
    return 0


def subject(
    name: str,
    overrides: Sequence[tuple[str, str]],
    program: Any,
    config: Mapping[str, Any],
    settled: Mapping[str, Any],
    jaxpr: Any,
) -> Subject:
    """What a trainer's program is called in its report; `settled`: what the trainer made of its config."""
    from bytescope.memory.compare.compare_rows import policy_words
    from bytescope.memory.compare.trainer import called
    from bytescope.memory.compare.worker import tokens_of
    from bytescope.memory.cost import flops
    from bytescope.memory.formulas import reconcile

    return Subject(
        name=called(name),
        changes=tuple(f"{key}={value}" for key, value in overrides),
        batch=settled["batch"],
        policy=policy_words(settled["segments"]),
        tokens=tokens_of(program),
        calls=program.calls_per_update,
        model_flops=0
        if jaxpr is None
        else round(reconcile.model_flops(config, settled, flops.count(jaxpr).model_flops)),
    )


def _of_file(args: argparse.Namespace, target: Any) -> Report:
    """Reports on a program that XLA dumped; the report."""
    from bytescope.memory.analysis import report_of, with_seconds
    from bytescope.memory.program.compilation import compiled_for

    compilation, target = compiled_for(args.hlo, target=target)
    report = with_seconds(report_of(compilation, target=target), measure=True)
    _show(report)
    _write(args, report, compilation.proto, {})
    return report


def _of_program(args: argparse.Namespace) -> Report:
    """Reports on a step that a function of the user's makes; the report."""
    from bytescope.memory.analysis import report_of, with_seconds
    from bytescope.memory.program.compilation import compiled_for

    found = user_program.load(args.program)
    options = dict(found.options)
    own = {key: options.pop(key, None) for key in user_program.OWN_OPTIONS}
    target = args.target if args.target != "local" else own["target"]
    with user_program.one_line_errors(f"{found.name}: the step cannot be compiled"):  # the first trace
        compilation, judged = compiled_for(found.program, found.args, own["kwargs"], target=target, options=options)
    report = with_seconds(
        report_of(compilation, target=judged, config=own["config"], roles=own["roles"] or (), names=own["names"] or ()),
        measure=True,
    )
    _show(report)
    _write(args, report, compilation.proto, {})
    return report


def _advise(report: Report, args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> None:
    """Prints by how much a program exceeds the target, the levers that its config has left, and the `fit` to copy."""
    from rich.console import Group
    from rich.text import Text

    from bytescope.memory.findings.post_mortem import ways_out
    from bytescope.memory.findings.remedies import advice
    from bytescope.memory.units import human
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Command, Prose

    missing = human(report.predicted_bytes - (report.limit_bytes or 0))
    parts: list[Any] = [Text(), Prose(f"does not fit: {missing} too much", "bold red")]
    if args.program:
        parts += [Prose(f"{human(way.bytes)}  {way.words}", indent=2) for way in ways_out(report)]
    if args.config:
        parts += map(Prose, advice.lines(report, advice.open_levers(report), []))
        if command := advice.fit_command(args.config, args.target, overrides, report):
            parts += [Text("the fastest that fits, found by compiling:", style="bold"), Command(command)]
    put(Group(*parts))


def _show(report: Report, choices: str = "") -> None:
    from bytescope.memory.report import report_text

    report_text.show(report, choices=choices)


def _formulas(
    report: Report, config: Mapping[str, Any], settled: Mapping[str, Any], jaxpr: Any
) -> dict[str, Any] | None:
    """Prints the formulas' figures with those of the report; returns them for the JSON, None where none apply."""
    from rich.console import Group
    from rich.text import Text

    from bytescope.memory.compare import formulas_text
    from bytescope.memory.cost import flops
    from bytescope.memory.formulas import reconcile
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    found = reconcile.formula_of(config, settled, report.target.get("platform", ""))
    if isinstance(found, str):
        put(Group(Text(), Prose(f"no formula: {found}")))
        return None
    counted = flops.count(jaxpr)
    formulas_text.show_report(
        found,
        reconcile.lines(
            found,
            report.peak_bytes,
            report.breakdown,
            {"model_flops": counted.model_flops, "hardware_flops": counted.hardware_flops},
            report.host_bytes,
        ),
    )
    return dataclasses.asdict(found)


def _run(report: Report, others: Mapping[str, int]) -> dict[str, int]:
    """Prints the peak of each program of a run and the largest of them; returns program -> bytes on one device."""
    from bytescope.memory.units import human
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    sizes = {"step": report.predicted_bytes, **others}
    most = max(sizes, key=sizes.__getitem__)
    parts = ", ".join(f"{name} {human(size)}" for name, size in sizes.items())
    put(Prose(f"peaks of the programs of a run, state included: {parts}; the largest is that of {most}"))
    return sizes


def _write(args: argparse.Namespace, report: Report, proto: bytes, more: Mapping[str, Any]) -> None:
    """Writes the files that were asked for; `more`: keys of the JSON beyond those of a report."""
    if args.json:
        write(args.json, json.dumps({**report.to_json(), **more}, indent=1) + "\n")
    if args.html:
        from bytescope.memory.report import report_page

        write(args.html, report_page.render(report))
    if args.export:
        from bytescope.memory.commands.xprof_export import export

        export(args.export, report, proto)
