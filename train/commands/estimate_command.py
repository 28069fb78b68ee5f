"""bytescope estimate: memory and FLOPs by published formulas, without compiling; as a page, with inputs to change."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import (
    check_files,
    keep_old_flag,
    user_path,
    write,
)
from bytescope.memory.errors import ReportError
from bytescope.memory.formulas import adapter_formulas, training_state, transformer_formulas
from bytescope.memory.formulas.memory_estimate import Estimate, Question, check, estimate
from bytescope.memory.formulas.model_shape import TARGETS, Adapters
from bytescope.memory.formulas.transformer_formulas import RECOMPUTE
from bytescope.train.commands.config_arguments import SET_KEY, add_config
from bytescope.train.plan import config_facts
from bytescope.train.plan.assumed_model import EXPERTS, LATENT, SHAPE, SWITCHES, checked_number, question_from_flags
from bytescope.train.plan.config_facts import question_of
from bytescope.train.program import config_files as configs
from bytescope.train.source import shipped, title_of

if TYPE_CHECKING:
    from bytescope.train.plan.estimate_page import Preset

# What may be given beside a config and beside --params: flag -> what it is.
WORK = {
    "length": "tokens of a sequence (default: the config's, else 2048)",
    "batch": "sequences per data-parallel rank and micro-batch (default: the config's, else 1)",
    "logit-tokens": "tokens of a rank that have logits at once, 0 for all",
    "mlp-tokens": "tokens of a rank whose MLP exists at once, 0 for all",
}
# Row of the JSON -> its title.
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

# (least total in bytes, decimal unit, its bytes, binary unit, its bytes); the first that the total reaches is used.
UNITS = ((1e13, "TB", 1e12, "TiB", 2**40), (1e9, "GB", 1e9, "GiB", 2**30), (0, "MB", 1e6, "MiB", 2**20))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_config(parser)
    parser.add_argument("--config.KEY", dest="unused", metavar="VALUE", help=SET_KEY)
    parser.add_argument(
        "--params", metavar="N", help="assume a GPT of about so many parameters instead of a config: 7e9, 7b, 350m"
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
    for old, now in (("width", "d-model"), ("head-width", "d-head"), ("mlp-width", "d-ff"), ("sequence", "length")):
        keep_old_flag(parser, f"--{old}", f"--{now}")
    parser.add_argument(
        "--zero",
        type=int,
        choices=training_state.ZERO,
        metavar="STAGE",
        help="ZeRO stage over the data-parallel ranks: 0 to 3",
    )
    parser.add_argument("--data", type=int, metavar="N", help="number of data-parallel ranks")
    parser.add_argument(
        "--expert-parallel", type=int, metavar="N", help="number of data-parallel ranks that share the routed experts"
    )
    parser.add_argument(
        "--tensor", type=int, metavar="N", help="number of devices to split heads, MLP width and vocabulary over"
    )
    parser.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="shard norms and the residual stream over the tensor-parallel ranks too",
    )
    for flag, choices, summary in (
        ("optimizer", config_facts.OPTIMIZERS, "the optimizer"),
        ("precision", config_facts.PRECISIONS, "dtypes of parameters, gradients, optimizer state and compute"),
        ("attention", transformer_formulas.ATTENTION, "whether attention scores are kept in memory"),
        ("offload", training_state.OFFLOAD, "what is kept in host memory"),
    ):
        parser.add_argument(f"--{flag}", choices=choices, metavar="NAME", help=f"{summary}: {', '.join(choices)}")
    parser.add_argument(
        "--lora-rank",
        type=int,
        metavar="N",
        help="train low-rank adapters of this rank over frozen weights; 0: the weights",
    )
    parser.add_argument(
        "--lora-targets",
        metavar="T,T",
        help=f"the matrices that have an adapter (default: all of {','.join(TARGETS)})",
    )
    parser.add_argument(
        "--lora-base",
        choices=adapter_formulas.BASES,
        metavar="NAME",
        help=f"how frozen weights are stored: {', '.join(adapter_formulas.BASES)}",
    )
    parser.add_argument(
        "--fused", action=argparse.BooleanOptionalAction, help="update each layer inside the backward pass"
    )
    parser.add_argument("--json", metavar="FILE", type=user_path, help="write the estimate as JSON")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=user_path,
        help="write the estimate as a page that opens offline, with inputs to change",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the estimate and writes the files that were asked for. A config is read by the trainer, not compiled."""
    notes: tuple[str, ...] = ()
    check_files(args)
    if args.params is not None and args.config:
        raise ReportError("give either a config or --params")
    if args.params is None and not args.config:
        raise ReportError(f"{configs.NO_CONFIG}, or --params=7e9")
    recompute = "none"
    if args.config:
        config = configs.load_flat(args.config, args.overrides)
        recompute = _recompute_of(config)
        question, notes = _configured(args, config), _notes_on(args, config)
    elif args.overrides:
        raise ReportError(f"--config.{args.overrides[0][0]} with --params: there is no config to change")
    else:
        question = question_from_flags(vars(args))
        notes = ("The shape is assumed: change it with --layers, --d-model, --heads, ...",)
    estimated = estimate(check(_spread(question, args)))
    noted = dataclasses.replace(estimated, notes=notes + estimated.notes)
    show(noted)
    _write(args, noted, recompute)
    return 0


def _configured(args: argparse.Namespace, config: Mapping[str, Any]) -> Question:
    """The question of a config; the flags of --params are refused."""
    for flag, (key, _) in SHAPE.items():
        if getattr(args, flag.replace("-", "_")) is not None:
            raise ReportError(f"--{flag} is for --params: with a config write --config.{key}=...")
    for flag, (_, _, key, _) in SWITCHES.items():
        if getattr(args, flag.replace("-", "_")):
            raise ReportError(f"--{flag} is for --params: with a config write --config.{key}=...")
    for flag, part in (EXPERTS | LATENT).items():
        if getattr(args, flag.replace("-", "_")) is not None:
            raise ReportError(f"--{flag} is for --params: with a config write --config.{part.key}=...")
    return question_of(config)


def _notes_on(args: argparse.Namespace, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the estimate does not know of a config's mesh."""
    notes = []
    for axis in ("data", "fsdp", "expert", "tensor"):
        flag = "tensor" if axis == "tensor" else "data"
        if config[f"mesh.{axis}"] == -1:
            if not getattr(args, flag):
                notes.append(f"mesh.{axis}=-1 counts as 1 device here: give the number with --{flag}=N.")
            break  # at most one axis may be -1
    if config["mesh.context"] != 1:
        notes.append(
            f"mesh.context={config['mesh.context']} is left out, which would divide the activations of a "
            "device by it: bytescope report --formulas counts it."
        )
    return tuple(notes)


def _spread(question: Question, args: argparse.Namespace) -> Question:
    """Returns the question with what the flags say of batch, devices, precision, optimizer, attention and offload."""
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
    for field, flag, least in (
        ("sequence", "length", 1),
        ("batch", "batch", 1),
        ("logit_tokens", "logit-tokens", 0),
        ("mlp_tokens", "mlp-tokens", 0),
    ):
        value = checked_number(given, flag, least)
        if value is not None:
            changes[field] = value
    if changes.get("logit_tokens") == 0:
        changes["logit_tokens"] = None  # all tokens have logits at once
    model = dataclasses.replace(question.model, adapters=_adapters(question.model.adapters, args))
    return dataclasses.replace(question, model=model, layout=dataclasses.replace(question.layout, **layout), **changes)


def _adapters(given: Adapters | None, args: argparse.Namespace) -> Adapters | None:
    """The adapters that the flags ask for, those of the config where they say nothing; None for none.

    Raises ReportError for what belongs to adapters where there are none.
    """
    rank = checked_number(vars(args), "lora-rank", 0)
    if not rank and (rank == 0 or given is None):
        for flag in ("lora_targets", "lora_base"):
            if getattr(args, flag) is not None:
                raise ReportError(
                    f"--{flag.replace('_', '-')}={getattr(args, flag)} without adapters: give --lora-rank=16 too"
                )
        return None
    start = given or Adapters(rank or 0)
    targets = start.targets
    if args.lora_targets is not None:
        targets = tuple(name.strip() for name in args.lora_targets.split(","))
    return Adapters(rank or start.rank, targets, args.lora_base or start.base)


def show(found: Estimate, console: Any = None) -> None:
    """Prints the estimate, to stdout when no console is given."""
    from rich.console import Group
    from rich.text import Text

    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Items, Prose

    q, layout = found.question, found.question.layout
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
                *_mixture(q),
                f"{q.model.layers} layers, width "
                f"{q.model.width}, {q.model.heads} heads, {q.batch} x {q.sequence} tokens",
            ]
        ),
        Prose(
            f"{tensor}, ZeRO {layout.zero} over {layout.data}{shared}; {q.precision.name}, {q.optimizer.name}, "
            f"{q.attention} attention{trained}; per device"
        ),
        _table(found),
        *(Prose(f"note: {note}", "dim") for note in found.notes),
    ]
    put(Group(*parts), console)


def _mixture(question: Question) -> list[str]:
    """What the first line says of experts."""
    found = question.model.experts
    if found is None:
        return []
    shared = f" and {found.shared} shared" if found.shared else ""
    return [f"{question.active:,.0f} active", f"{found.per_token} of {found.count}{shared} experts of {found.width}"]


def _table(found: Estimate) -> Any:
    """Bytes by row and policy, in decimal and in binary units."""
    from bytescope.memory.view.text_table import FigureTable, figure, words

    document, q = found.to_json(), found.question
    unit, size_of, binary, binary_size = next(row for least, *row in UNITS if found.total("none") >= least)
    heads = (figure(*about) for policy in found.activations for about in ((f"{policy}, {unit}",), (binary, "dim")))
    table = FigureTable(words(style="", least=14, under=False), figure("B/param"), *heads)
    for row, title in ROWS.items():
        if (row == "host" and not found.host) or (row == "frozen" and not q.model.adapters):
            continue
        each = document["per_parameter"].get(row)
        sizes = [document["policies"][policy][row] for policy in found.activations]
        table.add(
            title,
            "" if each is None else f"{each:.4g}",
            *(cell for size in sizes for cell in (f"{size / size_of:,.2f}", f"{size / binary_size:,.2f}")),
            style="bold" if row == "total" else "",
        )
    ratios = [f"{flops / found.model_flops:.3f}" for flops in found.hardware_flops.values()]
    table.add("hardware over model FLOPs", "", *(cell for ratio in ratios for cell in (ratio, "")))
    return table


def _write(args: argparse.Namespace, found: Estimate, recompute: str) -> None:
    """Writes the files asked for; the page offers every shipped config as a preset."""
    if args.json:
        write(args.json, json.dumps(found.to_json(), indent=1) + "\n")
    if args.html:
        from bytescope.train.plan import estimate_page

        name = title_of(args.config) if args.config else f"{found.question.parameters:,.0f} parameters"
        write(args.html, estimate_page.render(found.question, name, _presets(), recompute))


def _recompute_of(config: Mapping[str, Any]) -> str:
    """Returns the recomputation of the formulas, a key of `RECOMPUTE`, that is nearest to a config's remat policy."""
    policy = config["remat.policy"]
    return policy if policy in RECOMPUTE else "none"


def _presets() -> dict[str, Preset]:
    """The question and the recomputation of each shipped config that has formulas."""
    from bytescope.train.plan.estimate_page import Preset

    found = {}
    for path in shipped():
        config = configs.load_flat(path.stem)
        try:
            found[path.stem] = Preset(check(question_of(config)), _recompute_of(config))
        except ReportError:  # it names what no formula is known for
            continue
    return found
