"""Opens an engine or a scorer: weights on the available devices, and the pool of pages that fits beside them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.console import Console

from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import budget_of, limit_bytes
from bytescope.memory.devices.targets import Target
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.memory.view.progress_bar import progress
from bytescope.model.paged.page_pool import PAGE
from bytescope.model.quantized.quantized_formats import format_of
from bytescope.train.generate.budget import Budget, GenerationPlan, settle
from bytescope.train.generate.engine import Engine
from bytescope.train.generate.generate_flags import KV
from bytescope.train.generate.model_source import UNQUANTIZED, Source, describe_model
from bytescope.train.generate.score import Scorer
from bytescope.train.generate.steps import EngineSizes, Steps
from bytescope.train.source import title_of
from bytescope.train.user_errors import DoesNotFit, UserError

# Of a CPU's memory, which the system needs too.
CPU_SHARE = 0.5
# Platform -> sequences at once, tokens of prompts in a step: a CPU is soon busy, a GPU wants many rows.
DEFAULTS = {"cpu": (8, 64)}
OTHERS = (64, 512)


def sizes_of(args: argparse.Namespace, platform: str, longest: int, needed: int, count: int | None) -> EngineSizes:
    """Returns the sizes of an engine whose pool is not known yet: 0 pages.

    longest: max positions of the model. needed: positions of the longest request. count: number of requests; None if
    more may come.

    Raises:
      UserError: --length is more than the model takes.
    """
    sequences, chunk = DEFAULTS.get(platform, OTHERS)
    if args.length is not None and args.length > longest:
        raise UserError(f"--length={args.length}: the model takes {longest} positions; give at most that")
    sequences = args.sequences or min(sequences, count or sequences)
    if args.length is None:  # powers of two, so that programs are found again in the compilation cache
        length = PAGE
        while length < min(needed, longest):
            length *= 2
    return EngineSizes(0, sequences, args.chunk or chunk, args.length or min(length, longest))


def budget(
    steps: Steps,
    sizes: EngineSizes,
    limit: int,
    drawing: Sequence[bool],
    target: Target,
    tell: Callable[[str], None] = lambda name: None,
) -> tuple[Budget, dict[str, ReportRecord]]:
    """Compiles the steps; returns the budget with the pool that fits the limit, and step -> its memory report.

    drawing: whether tokens are drawn; both where nobody knows yet.

    Raises:
      DoesNotFit: none does.
    """
    reports: dict[str, ReportRecord] = {}
    # A prompt ends in a token, too; drawing it takes what of one row is nothing beside the rest.
    shapes = {"one token each, drawn" if drawn else "one token each": (sizes.sequences, 1, drawn) for drawn in drawing}
    shapes["prompts"] = sizes.rows(1, sizes.chunk), sizes.chunk, drawing[-1]

    def measure(pages: int) -> dict[str, int]:
        found = {}
        for name, (rows, width, drawn) in shapes.items():
            tell(name)
            reports[name] = steps.report(with_pages(sizes, pages), rows, width, drawn, target)
            found[name] = steps.extra_bytes(with_pages(sizes, pages), reports[name])
        return found

    most = sizes.sequences * sizes.table + 1
    pages, extra = settle(limit, steps.weight_bytes, steps.page_bytes, most, measure)
    found = Budget(limit, steps.weight_bytes, extra, steps.page_bytes, PAGE, pages, sizes.sequences, sizes.length)
    return found, reports


def with_pages(sizes: EngineSizes, pages: int) -> EngineSizes:
    """The same sizes with so many pages."""
    return dataclasses.replace(sizes, pages=pages)


def _steps_here(args: argparse.Namespace, source: Source) -> Steps:
    """The programs of a source's model for the devices of this process."""
    return _steps(args, source.config, jax.devices(), source.base)


def _steps(args: argparse.Namespace, config: ConfigDict, devices: Sequence[jax.Device], base: str) -> Steps:
    model = describe_model(config, devices, args.fsdp, args.tensor, args.dtype, base)
    return Steps(model, args.kernel, KV[args.kv] or model.precision.compute)


def limit_here(args: argparse.Namespace, device: jax.Device) -> int:
    """Returns the bytes of a device that may be used: --limit, or by default all, and half of a CPU's memory."""
    available = limit_bytes(device)
    return budget_of(args.limit or "", int(CPU_SHARE * available) if device.platform == "cpu" else available, "--limit")


def plan(name: str, config: ConfigDict, target: Target, args: argparse.Namespace) -> GenerationPlan:
    """Returns the memory of generating from a config's model on a target, which may be a described one.

    Raises:
      DoesNotFit: no page is left. UserError: what the user can mend.
    """
    devices = target.devices()
    base = args.weights or UNQUANTIZED
    steps = _steps(args, config, devices, base)
    longest = config.model.max_seq_len
    sizes = sizes_of(args, devices[0].platform, longest, longest, None)
    found, reports = budget(steps, sizes, target.limit_bytes, (False, True), target)
    share = f"sharded over fsdp {args.fsdp} x tensor {args.tensor}" if args.fsdp * args.tensor > 1 else "one device"
    weights = jax.numpy.dtype(steps.model.precision.compute).name
    if base != UNQUANTIZED:
        weights = f"{format_of(base).summary}, the rest {weights}"
    facts = (
        f"{target.name}, {share}; weights {weights}, keys and values {steps.stored.name}, attention {args.kernel}",
        f"{sizes.sequences} sequences of up to {sizes.length:,} positions at once, prompts in steps of "
        f"{sizes.chunk} tokens",
    )
    return GenerationPlan(title_of(name), facts, found, reports)


def open_engine(args: argparse.Namespace, source: Source, needed: int, count: int | None, drawing: bool) -> Engine:
    """Opens an engine for requests of up to `needed` positions, with its weights loaded. On a terminal it first prints
    the memory.

    count: how many requests there are, None where more may come. drawing: whether any of them draws.

    Raises:
      DoesNotFit: the weights leave no room. UserError: what the user can mend.
    """
    steps, device = _steps_here(args, source), jax.local_devices()[0]
    limit = limit_here(args, device)
    sizes = sizes_of(args, device.platform, source.length, needed, count)
    console = Console(stderr=True)
    with contextlib.ExitStack() as shown:
        status = shown.enter_context(console.status("compiling")) if console.is_terminal else None
        found, _ = budget(
            steps,
            sizes,
            limit,
            (drawing,),
            targets.parse("local"),
            lambda name: status.update(f"compiling the step of {name}") if status else None,
        )
    if console.is_terminal:
        console.print(
            f"weights {human(found.weights)}, pool {human(found.pool)} for {found.positions:,} positions, "
            f"largest step {human(found.step)}; {human(found.limit)} available",
            highlight=False,
        )
    with progress(None, "reading weights", "bytes", console) as bar:
        params = source.read(steps.model, bar.show)
    return Engine(steps, params, with_pages(sizes, found.pages))


def open_scorer(args: argparse.Namespace, source: Source, longest: int) -> tuple[Scorer, Any]:
    """Opens (the programs that score texts of up to `longest` tokens, the weights).

    Raises:
      DoesNotFit: weights, pages and temporaries do not. UserError: what the user can mend.
    """
    steps, device = _steps_here(args, source), jax.local_devices()[0]
    limit = limit_here(args, device)
    scorer = Scorer(steps, longest, args.chunk or DEFAULTS.get(device.platform, OTHERS)[1])
    if scorer.bytes > limit:
        raise DoesNotFit(
            f"scoring {longest:,} tokens takes {human(scorer.bytes)} of {human(limit)}, of which the "
            f"weights {human(steps.weight_bytes)}: give a shorter --length, a smaller --chunk, or more "
            "devices (--tensor=N or --fsdp=N)"
        )
    with progress(None, "reading weights", "bytes") as bar:
        return scorer, source.read(steps.model, bar.show)
