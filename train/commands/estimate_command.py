"""bytescope estimate: estimates memory and FLOPs with published formulas, without compiling.

--html writes a page with editable inputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import (
    add_json,
    add_settings,
    check_files,
    user_path,
    write,
)
from bytescope.memory.commands.json_output import FORMULAS, write_json
from bytescope.memory.errors import ReportError
from bytescope.memory.formulas import adapter_formulas, training_state, transformer_formulas
from bytescope.memory.formulas.memory_estimate import Estimate, Question, check, estimate
from bytescope.memory.formulas.model_shape import TARGETS, Adapters
from bytescope.memory.formulas.transformer_formulas import RECOMPUTE
from bytescope.train.commands.config_arguments import SET_KEY, add_config
from bytescope.train.pipeline.schedule_figures import held_share, idle_fraction
from bytescope.train.pipeline.schedules import SCHEDULES, make_schedule
from bytescope.train.plan import config_facts
from bytescope.train.plan.assumed_model import EXPERTS, LATENT, SHAPE, SWITCHES, checked_number, question_from_flags
from bytescope.train.plan.config_facts import question_of
from bytescope.train.source import NO_CONFIG, shipped, title_of

if TYPE_CHECKING:
    from bytescope.train.plan.estimate_page import Preset

# Flags that are valid both with a config and with --params: flag -> help text.
WORK = {
    "length": "tokens per sequence (default: from the config, 2048 with --params)",
    "batch": "sequences per data-parallel rank and micro-batch (default: from the config, 1 with --params)",
    "logit-tokens": "tokens per rank whose logits are computed at the same time; 0 means all tokens",
    "mlp-tokens": "tokens per rank whose MLP activations are computed at the same time; 0 means all tokens",
}
# The schedule of a model without a config, and the most forward passes of stages in a simulated schedule.
USUAL_SCHEDULE, MAX_PASSES = "1f1b", 100_000
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
    add_config(parser)
    add_settings(parser, SET_KEY)
    parser.add_argument(
        "--params",
        metavar="N",
        help="estimate a GPT with about N parameters instead of a config; N is a number such as 7e9, 7b or 350m",
    )
    for flag, (_, summary) in SHAPE.items():
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=f"with --params: {summary}")
    for flag, (_, _, _, summary) in SWITCHES.items():
        parser.add_argument(f"--{flag}", action="store_true", help=f"with --params: {summary}")
    for flag, part in (EXPERTS | LATENT).items():
        if part.kind is bool:
            parser.add_argument(f"--{flag}", action="store_const", const=True, help=f"with --params: {part.summary}")
        else:
            parser.add_argument(f"--{flag}", type=part.kind, metavar="N", help=f"with --params: {part.summary}")
    for flag, summary in WORK.items():
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=summary)
    parser.add_argument(
        "--zero",
        type=int,
        choices=training_state.ZERO,
        metavar="STAGE",
        help="ZeRO stage, what the data-parallel ranks shard: 0: nothing, 1: optimizer state, 2: also gradients, "
        "3: also parameters (default: from the config, else 0)",
    )
    parser.add_argument(
        "--data", type=int, metavar="N", help="number of data-parallel ranks (default: from the config, else 1)"
    )
    parser.add_argument(
        "--expert-parallel",
        type=int,
        metavar="N",
        help="number of data-parallel ranks to divide the routed experts over (default: from the config, else 1)",
    )
    parser.add_argument(
        "--tensor",
        type=int,
        metavar="N",
        help="number of tensor-parallel devices, which divide heads, MLP width and vocabulary (default: from the "
        "config, else 1)",
    )
    parser.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="also shard norms and the residual stream over the tensor-parallel ranks (default: from the config, else "
        "no)",
    )
    parser.add_argument(
        "--stages", type=int, metavar="P", help="number of pipeline stages (default: mesh.stage of the config, else 1)"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="with stages: number of micro-batches per update (default: batch.accumulation of the config)",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"with stages: pipeline schedule, {', '.join(SCHEDULES)} (default: that of the config, or "
        f"{USUAL_SCHEDULE})",
    )
    for flag, choices, summary in (
        ("optimizer", config_facts.OPTIMIZERS, "the optimizer"),
        ("precision", config_facts.PRECISIONS, "dtypes of parameters, gradients, optimizer state and compute"),
        ("attention", transformer_formulas.ATTENTION, "attention kernel; only some kernels store the attention scores"),
        ("offload", training_state.OFFLOAD, "training state to keep in host memory"),
    ):
        parser.add_argument(f"--{flag}", choices=choices, metavar="NAME", help=f"{summary}: {', '.join(choices)}")
    parser.add_argument(
        "--lora-rank",
        type=int,
        metavar="N",
        help="rank of LoRA adapters, which are trained instead of the weights; 0 trains the weights (default: "
        "from the config, else 0)",
    )
    parser.add_argument(
        "--lora-targets",
        metavar="T,T",
        help=f"weight matrices that have an adapter (default: {','.join(TARGETS)})",
    )
    parser.add_argument(
        "--lora-base",
        choices=adapter_formulas.BASES,
        metavar="NAME",
        help=f"storage format of the frozen weights: {', '.join(adapter_formulas.BASES)}",
    )
    parser.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        help="update each layer's parameters inside the backward pass, so that few gradients exist at the same time",
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
    notes: tuple[str, ...] = ()
    check_files(args)
    if args.params is not None and args.config:
        raise ReportError("a config and --params cannot be combined: give one of the two")
    if args.params is None and not args.config:
        raise ReportError(f"{NO_CONFIG}, or --params=7e9")
    recompute = "none"
    if args.config:
        from bytescope.train.program import config_files as configs

        config = configs.load_flat(args.config, args.overrides)
        recompute = _policy_with_formula(config)
        question, notes = _question_of_config(args, config), _mesh_notes(args, config)
    elif args.overrides:
        raise ReportError(
            f"--config.{args.overrides[0][0]} cannot be used with --params, because it needs a config: leave it out, "
            "or give a config instead of --params"
        )
    else:
        question = question_from_flags(vars(args))
        notes = ("The shape is assumed: change it with --layers, --d-model, --heads, ...",)
    question, staged = _apply_stages(question, args, config if args.config else {})
    estimated = estimate(check(_apply_flags(question, args)))
    noted = dataclasses.replace(estimated, notes=notes + staged + estimated.notes)
    show(noted)
    _write_files(args, noted, recompute)
    return 0


def _question_of_config(args: argparse.Namespace, config: Mapping[str, Any]) -> Question:
    for flag, (key, _) in SHAPE.items():
        if getattr(args, flag.replace("-", "_")) is not None:
            raise ReportError(f"--{flag} is only valid with --params: with a config write --config.{key}=...")
    for flag, (_, _, key, _) in SWITCHES.items():
        if getattr(args, flag.replace("-", "_")):
            raise ReportError(f"--{flag} is only valid with --params: with a config write --config.{key}=...")
    for flag, part in (EXPERTS | LATENT).items():
        if getattr(args, flag.replace("-", "_")) is not None:
            raise ReportError(f"--{flag} is only valid with --params: with a config write --config.{part.key}=...")
    return question_of(config)


def _mesh_notes(args: argparse.Namespace, config: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    for axis in ("data", "fsdp", "expert", "tensor"):
        flag = "tensor" if axis == "tensor" else "data"
        if config[f"mesh.{axis}"] == -1:
            if not getattr(args, flag):
                notes.append(f"mesh.{axis}=-1 counts as 1 device: give the number of devices with --{flag}=N.")
            break  # at most one axis may be -1
    if config["mesh.context"] != 1:
        notes.append(
            f"mesh.context={config['mesh.context']} is ignored, although it divides the activations per device: "
            "use bytescope report --formulas, which counts it."
        )
    return tuple(notes)


def _apply_flags(question: Question, args: argparse.Namespace) -> Question:
    """Returns a copy of `question`, the inputs of the estimate, in which the flags for batch, devices, precision,
    optimizer, attention, offload and LoRA adapters replace the values of the config.
    """
    given = vars(args)
    layout = {name: given[name] for name in ("zero", "data", "tensor") if given[name] is not None}
    if args.expert_parallel is not None:
        layout["expert"] = checked_number(given, "expert-parallel")
    if args.sequence_parallel is not None:
        layout["sequence"] = args.sequence_parallel
    changes: dict[str, Any] = {name: given[name] for name in ("attention", "offload") if given[name]}
    if args.optimizer:
        changes["optimizer"] = config_facts.OPTIMIZERS[args.optimizer]
    if args.precision:
        changes["precision"] = config_facts.PRECISIONS[args.precision]
    if args.fused is not None:
        changes["fused"] = args.fused
    for field, flag, minimum in (
        ("sequence", "length", 1),
        ("batch", "batch", 1),
        ("logit_tokens", "logit-tokens", 0),
        ("mlp_tokens", "mlp-tokens", 0),
    ):
        value = checked_number(given, flag, minimum)
        if value is not None:
            changes[field] = value
    if changes.get("logit_tokens") == 0:
        changes["logit_tokens"] = None  # all tokens have logits at once
    model = dataclasses.replace(question.model, adapters=_adapters(question.model.adapters, args))
    return dataclasses.replace(question, model=model, layout=dataclasses.replace(question.layout, **layout), **changes)


def _apply_stages(
    question: Question, args: argparse.Namespace, config: Mapping[str, Any]
) -> tuple[Question, tuple[str, ...]]:
    """Returns the question with the pipeline stages of the flags, and a sentence for each schedule with its idle
    fraction and stored activations; () without stages.

    config: the whole config, dotted key -> value; {} with --params.
    """
    given = vars(args)
    flags = {flag: given[flag.replace("-", "_")] for flag in ("stages", "micro-batches", "schedule")}
    stages = checked_number(given, "stages") or question.layout.pipeline
    if stages == 1:
        for flag, value in flags.items():
            if value is not None and flag != "stages":
                raise ReportError(f"--{flag}={value} has no effect without pipeline stages: give --stages=4 too")
        return question, ()
    if args.html:
        raise ReportError(f"--html={args.html} has no pipeline stages: leave --html out, or use one stage")
    micro_batches = checked_number(given, "micro-batches")
    if micro_batches is None and config:
        mesh = config_facts.mesh_of(config)
        micro_batches = config_facts.accumulation(config, math.prod(mesh[axis] for axis in config_facts.BATCH_AXES))
    if not micro_batches:
        raise ReportError(f"--stages={stages} needs --micro-batches=M, the micro-batches of an update: add it")
    if stages * micro_batches > MAX_PASSES:
        raise ReportError(
            f"{stages} stages with {micro_batches} micro-batches are too many to simulate: give stages times "
            f"micro-batches of at most {MAX_PASSES:,}"
        )
    chosen = args.schedule or config.get("pipeline.schedule", USUAL_SCHEDULE)
    sentences, layout = [], question.layout
    for name in dict.fromkeys([chosen, *SCHEDULES]):
        virtual = SCHEDULES[name].chunks if name in SCHEDULES else 1
        if name == config.get("pipeline.schedule") and config["pipeline.virtual"] > 1:
            virtual = config["pipeline.virtual"]
        try:
            schedule = make_schedule(name, stages, micro_batches, virtual)
            stash = float(held_share(schedule, question.model.layers))
        except ReportError as error:
            if name == chosen:
                raise
            sentences.append(f"{error}.")
            continue
        sentences.append(
            f"{stages} stages, {micro_batches} micro-batches, {name}: each stage is idle "
            f"{100 * idle_fraction(schedule):.1f} % of the time and stores {stash:.3g} times the activations that all "
            "layers save for one micro-batch."
        )
        if name == chosen and any(value is not None for value in flags.values()):
            layout = dataclasses.replace(layout, pipeline=stages, interleave=schedule.virtual, stash=stash)
    return dataclasses.replace(question, layout=layout), tuple(sentences)


def _adapters(given: Adapters | None, args: argparse.Namespace) -> Adapters | None:
    """Returns the LoRA adapters to estimate; None if there are none.

    A value that no flag sets is taken from `given`, the adapters of the config.

    Raises ReportError if --lora-targets or --lora-base is given but there are no adapters.
    """
    rank = checked_number(vars(args), "lora-rank", 0)
    if not rank and (rank == 0 or given is None):
        for flag in ("lora_targets", "lora_base"):
            if getattr(args, flag) is not None:
                raise ReportError(
                    f"--{flag.replace('_', '-')}={getattr(args, flag)} has no effect without adapters: give "
                    "--lora-rank=16 too"
                )
        return None
    start = given or Adapters(rank or 0)
    targets = start.targets
    if args.lora_targets is not None:
        targets = tuple(name.strip() for name in args.lora_targets.split(","))
    return Adapters(rank or start.rank, targets, args.lora_base or start.base)


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
                f"{q.model.layers} layers, width "
                f"{q.model.width}, {q.model.heads} heads, {q.batch} x {q.sequence} tokens",
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

    document, q = estimated.to_json(), estimated.question
    unit, decimal_size, binary, binary_size = next(row for minimum, *row in UNITS if estimated.total("none") >= minimum)
    heads = (figure(*about) for policy in estimated.activations for about in ((f"{policy}, {unit}",), (binary, "dim")))
    table = FigureTable(words(style="", min_width=14, under=False), figure("B/param"), *heads)
    for row, title in ROWS.items():
        if (row == "host" and not estimated.host) or (row == "frozen" and not q.model.adapters):
            continue
        each = document["per_parameter"].get(row)
        sizes = [document["policies"][policy][row] for policy in estimated.activations]
        table.add(
            title,
            "" if each is None else f"{each:.4g}",
            *(cell for size in sizes for cell in (f"{size / decimal_size:,.2f}", f"{size / binary_size:,.2f}")),
            style="bold" if row == "total" else "",
        )
    ratios = [f"{flops / estimated.model_flops:.3f}" for flops in estimated.hardware_flops.values()]
    table.add("hardware over model FLOPs", "", *(cell for ratio in ratios for cell in (ratio, "")))
    return table


def _write_files(args: argparse.Namespace, estimated: Estimate, recompute: str) -> None:
    write_json(args, estimated.to_json(), caveats=(FORMULAS, *estimated.notes))
    if args.html:
        from bytescope.train.plan import estimate_page

        name = title_of(args.config) if args.config else f"{estimated.question.parameters:,.0f} parameters"
        write(args.html, estimate_page.render(estimated.question, name, _shipped_presets(), recompute))


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
