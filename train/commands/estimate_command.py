"""bytescope estimate: estimates memory and FLOPs with published formulas, without compiling.

--html writes a page with editable inputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import add_json, add_settings, check_files, user_path, write
from bytescope.memory.commands.json_output import FORMULAS, write_json
from bytescope.memory.devices.platform import simulate_devices
from bytescope.memory.errors import ReportError
from bytescope.memory.formulas import adapter_formulas
from bytescope.memory.formulas.memory_estimate import Estimate, Question, check, estimate
from bytescope.memory.formulas.transformer_formulas import RECOMPUTE
from bytescope.memory.units import human, plural
from bytescope.train.commands.config_arguments import CONFIG_FORMS, SET_KEY, add_config, add_target
from bytescope.train.pipeline.schedule import SCHEDULES, held_share, idle_fraction, make_schedule
from bytescope.train.plan import config_facts
from bytescope.train.plan.config_facts import question_of
from bytescope.train.source import ASSUMED, NO_CONFIG, shipped, title_of

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target
    from bytescope.train.plan.estimate_page import Preset

# Row of the JSON -> title of the row in the table.
ROWS = {
    "params": "parameters",
    "frozen": "frozen parameters",
    "gradients": "gradients",
    "optimizer": "optimizer and master copy",
    "kept": "activations of the layers",
    "recomputed": "one layer recomputed",
    "outside": "embedding, head and logits",
    "total": "total",
    "host": "in host memory",
}

# (min total in bytes, decimal unit, its bytes, binary unit, its bytes). The first row that the total reaches is used.
UNITS = ((1e13, "TB", 1e12, "TiB", 2**40), (1e9, "GB", 1e9, "GiB", 2**30), (0, "MB", 1e6, "MiB", 2**20))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope estimate` to the parser."""
    add_config(parser, CONFIG_FORMS | {"gpt:N": "a GPT with about N parameters, such as gpt:7e9, gpt:7b or gpt:350m"})
    add_target(
        parser,
        "devices, such as h100:8: their number, over which a mesh axis of -1 shards, and their memory, in which "
        "the step has to fit (default: one device)",
        default=None,
    )
    add_settings(parser, SET_KEY)
    parser.add_argument(
        "--stages", type=int, metavar="P", help="number of pipeline stages (default: mesh.stage of the config)"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="number of micro-batches per update, for a model in pipeline stages (default: batch.accumulation of the "
        "config)",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"pipeline schedule, for a model in pipeline stages: {', '.join(SCHEDULES)} (default: "
        "pipeline.schedule of the config)",
    )
    add_json(parser, "the estimate")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=user_path,
        help="write the estimate as a page that opens offline, with editable inputs",
    )


def run(args: argparse.Namespace) -> int:
    """Estimates memory and FLOPs by formulas, prints the estimate and writes the requested files; returns the exit
    code. Nothing is compiled.
    """
    check_files(args)
    if args.subject is None:
        raise ReportError(f"{NO_CONFIG}; or gpt:7e9 for a GPT with 7e9 parameters")
    named, overrides = args.subject.name, args.subject.keys
    simulate_devices([args.target or ""])
    target = args.subject.devices(args.target) if args.target else None
    if named.startswith(ASSUMED):
        from bytescope.train.plan.assumed_model import assume_config

        parameters, config = assume_config(named, overrides)
        notes = ["The shape is assumed: change it with model.n_layers=N, model.d_model=N, model.n_heads=N, ..."]
    else:
        from bytescope.train.program.config_files import load_flat

        config = load_flat(named, overrides)
        notes = _mesh_notes(config, target)
    config = _with_stages(config, args)
    devices = target.n_devices if target else 0
    meshed = math.prod(config_facts.mesh_of(config, devices).values())
    if target and meshed != devices:
        raise ReportError(
            f"the mesh of {named} has {meshed} devices, but {target.name} has {devices}: give as many, or "
            "mesh.fsdp=-1 for all that the other axes leave"
        )
    question = check(question_of(config, devices))
    if named.startswith(ASSUMED):
        question = dataclasses.replace(question, parameters=parameters)
    if args.html and question.layout.pipeline > 1:
        raise ReportError(f"--html={args.html} has no pipeline stages: leave --html out, or use one stage")
    estimated = estimate(question)
    notes += _stage_notes(config, question, devices)
    if target:
        notes.append(_fit_note(estimated, target))
    noted = dataclasses.replace(estimated, notes=(*notes, *estimated.notes))
    show(noted)
    write_json(args, noted.result(), caveats=(FORMULAS, *noted.notes))
    if args.html:
        from bytescope.train.plan import estimate_page

        title = f"{question.parameters:,.0f} parameters" if named.startswith(ASSUMED) else title_of(named)
        write(args.html, estimate_page.render(question, title, _shipped_presets(), _policy_with_formula(config)))
    return 0


def _mesh_notes(config: Mapping[str, Any], target: Target | None) -> list[str]:
    notes = []
    for axis in ("data", "fsdp", "expert", "tensor"):
        if config[f"mesh.{axis}"] == -1 and target is None:
            notes.append(f"mesh.{axis}=-1 counts as 1 device: give a target, such as h100:8, or mesh.{axis}=N.")
    if config["mesh.context"] != 1:
        notes.append(
            f"mesh.context={config['mesh.context']} is ignored, although it divides the activations per device: "
            "use bytescope report --formulas, which counts it."
        )
    return notes


def _fit_note(estimated: Estimate, target: Target) -> str:
    fitting = [policy for policy in estimated.activations if estimated.total(policy) <= target.limit_bytes]
    policies = f"the estimates for {', '.join(fitting)} fit" if fitting else "no estimate fits"
    return f"{target.name} has {human(target.limit_bytes)} for a program on each device: {policies}."


def _with_stages(config: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Returns the config, dotted key -> value, with the pipeline of --stages, --micro-batches and --schedule."""
    changed = dict(config)
    if args.stages is not None:
        changed["mesh.stage"] = args.stages
    for flag, value in (("micro-batches", args.micro_batches), ("schedule", args.schedule)):
        if value is not None and changed["mesh.stage"] == 1:
            raise ReportError(f"--{flag}={value} has no effect without pipeline stages: give --stages=4 too")
    if args.stages is not None and args.stages < 1:
        raise ReportError(f"--stages={args.stages} is out of range: give at least 1")
    if args.micro_batches is not None:
        changed |= {"batch.accumulation": args.micro_batches, "batch.tokens": 0}
    if args.schedule is not None:
        changed |= {"pipeline.virtual": _chunks(config, args.schedule), "pipeline.schedule": args.schedule}
    return changed


def _chunks(config: Mapping[str, Any], schedule: str) -> int:
    if schedule == config["pipeline.schedule"] and config["pipeline.virtual"] > 1:
        return int(config["pipeline.virtual"])
    return SCHEDULES[schedule].chunks if schedule in SCHEDULES else 1


def _stage_notes(config: Mapping[str, Any], question: Question, devices: int) -> list[str]:
    """Returns a sentence for each schedule with its idle fraction and stored activations; [] without stages.

    config: dotted key -> value. devices: total number of devices; 0 if unknown.
    """
    stages = question.layout.pipeline
    if stages == 1:
        return []
    mesh = config_facts.mesh_of(config, devices)
    micro_batches = config_facts.accumulation(config, math.prod(mesh[axis] for axis in config_facts.BATCH_AXES))
    notes = []
    for name in dict.fromkeys([config["pipeline.schedule"], *SCHEDULES]):
        try:
            schedule = make_schedule(name, stages, micro_batches, _chunks(config, name))
            stash = float(held_share(schedule, question.model.layers))
        except ReportError as error:
            notes.append(f"{error}.")
            continue
        notes.append(
            f"{stages} stages, {micro_batches} micro-batches, {name}: each stage is idle "
            f"{100 * idle_fraction(schedule):.1f} % of the time and stores {stash:.3g} times the activations that all "
            "layers save for one micro-batch."
        )
    return notes


def show(estimated: Estimate, console: Any = None) -> None:
    """Prints the estimate to a rich console, by default to stdout."""
    from rich.console import Group
    from rich.text import Text

    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Items, Prose

    q, layout = estimated.question, estimated.question.layout
    asked, trained = q.model.adapters, ""
    if asked:
        trained = (
            f"; LoRA of rank {asked.rank} on {', '.join(adapter_formulas.adapted_anywhere(q.model))}: "
            f"{adapter_formulas.adapter_count(q.model):,} trained, frozen weights in {asked.base}"
        )
    shared = f", experts over {layout.expert} of them" if layout.expert > 1 else ""
    stages = f"{layout.pipeline} stages, a stash of {layout.stash:.3g} of all layers, " if layout.stash else ""
    tensor = f"{stages}tensor {layout.tensor}{' with sequence' if layout.sequence else ''}"
    parts = [
        Items(
            [
                Text(f"{q.parameters:,.0f} parameters", style="bold"),
                *_describe_experts(q),
                f"{plural(q.model.layers, 'layer')}, width {q.model.width}, {plural(q.model.heads, 'head')}, "
                f"{q.batch} x {q.sequence} tokens",
            ]
        ),
        Prose(
            f"{tensor}, ZeRO {layout.zero} over {layout.data}{shared}; {q.precision.name}, {q.optimizer.name}, "
            f"{q.attention} attention{trained}; per device"
        ),
        _estimate_table(estimated),
        *(Prose(f"note: {note}", "dim") for note in estimated.notes),
    ]
    put(Group(*parts), console)


def _describe_experts(question: Question) -> list[str]:
    experts = question.model.experts
    if experts is None:
        return []
    shared = f" and {experts.shared} shared" if experts.shared else ""
    return [
        f"{question.active:,.0f} active",
        f"{experts.per_token} of {experts.count}{shared} experts of {experts.width}",
    ]


def _estimate_table(estimated: Estimate) -> Any:
    """Returns the table of estimated bytes, with a row per use of memory, such as gradients, and a column per remat
    policy.
    """
    from bytescope.memory.view.text_table import FigureTable, figure, words

    result, q = estimated.result(), estimated.question
    unit, decimal_size, binary, binary_size = next(row for minimum, *row in UNITS if estimated.total("none") >= minimum)
    heads = (figure(*about) for policy in estimated.activations for about in ((f"{policy}, {unit}",), (binary, "dim")))
    table = FigureTable(words(style="", min_width=14, under=False), figure("B/param"), *heads)
    for row, title in ROWS.items():
        if (row == "host" and not estimated.host) or (row == "frozen" and not q.model.adapters):
            continue
        each = result.per_parameter.get(row)
        sizes = [getattr(policy, row) for policy in result.policies.values()]
        table.add(
            title,
            "" if each is None else f"{each:.4g}",
            *(cell for size in sizes for cell in (f"{size / decimal_size:,.2f}", f"{size / binary_size:,.2f}")),
            style="bold" if row == "total" else "",
        )
    ratios = [f"{flops / estimated.model_flops:.3f}" for flops in estimated.hardware_flops.values()]
    table.add("hardware over model FLOPs", "", *(cell for ratio in ratios for cell in (ratio, "")))
    return table


def _policy_with_formula(config: Mapping[str, Any]) -> str:
    # RECOMPUTE contains the remat policies with formulas.
    policy = config["remat.policy"]
    return policy if policy in RECOMPUTE else "none"


def _shipped_presets() -> dict[str, Preset]:
    from bytescope.train.plan.estimate_page import Preset
    from bytescope.train.program import config_files as configs

    presets = {}
    for path in shipped():
        config = configs.load_flat(path.stem)
        try:
            presets[path.stem] = Preset(check(question_of(config)), _policy_with_formula(config))
        except ReportError:  # no formula is known for a part of this config
            continue
    return presets
