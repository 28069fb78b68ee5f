"""Opens an engine or a scorer: weights on the available devices, and the largest KV cache that fits next to them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.console import Console

from bytescope.memory.devices import targets
from bytescope.memory.devices.limits import budget_of, limit_bytes
from bytescope.memory.devices.targets import Target
from bytescope.memory.host.process_memory import host_phase, release_free_memory
from bytescope.memory.records.host_record import HostTerm
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.report.host_notice import expect_host, host_line, resident_term, warn_if_too_large
from bytescope.memory.units import human, plural
from bytescope.memory.view.progress_bar import progress
from bytescope.model.paged.page_pool import PAGE
from bytescope.model.quantized.quantized_formats import format_of
from bytescope.train.generate.budget import GenerationMemory, GenerationPlan, settle
from bytescope.train.generate.engine import Engine
from bytescope.train.generate.generate_flags import CPU_SHARE, DEFAULTS, KV, OTHERS
from bytescope.train.generate.model_source import UNQUANTIZED, Source, describe_model, reading_terms
from bytescope.train.generate.score import Scorer
from bytescope.train.generate.steps import EngineSizes, Steps
from bytescope.train.source import title_of
from bytescope.train.user_errors import DoesNotFit, UserError
from bytescope.train.weights.load import bytes_on_host


def sizes_of(args: argparse.Namespace, platform: str, longest: int, needed: int, count: int | None) -> EngineSizes:
    """Returns the static shapes of an engine's programs. The number of KV cache pages is left at 0, to be set later.

    Args:
      args: the command line, with --sequences and --length.
      platform: jax platform, such as "cpu" or "gpu", which decides the defaults.
      longest: maximum number of token positions of the model.
      needed: number of token positions of the longest request.
      count: number of requests; None if more requests may come.

    Raises:
      UserError: --length is larger than the model's maximum.
    """
    sequences = DEFAULTS.get(platform, OTHERS)[0]
    if args.length is not None and args.length > longest:
        raise UserError(
            f"--length={args.length} is more than the {longest} positions of the model: give at most {longest}"
        )
    sequences = args.sequences or min(sequences, count or sequences)
    if args.length is None:  # powers of two, so that later runs find the programs in the compilation cache
        length = PAGE
        while length < min(needed, longest):
            length *= 2
    return EngineSizes(0, sequences, _chunk(platform, longest), args.length or min(length, longest))


def _chunk(platform: str, longest: int) -> int:
    # A step must not have more positions than the model; whole pages only.
    return min(DEFAULTS.get(platform, OTHERS)[1], max(longest // PAGE, 1) * PAGE)


def budget(
    steps: Steps,
    sizes: EngineSizes,
    limit: int,
    drawing: Sequence[bool],
    target: Target,
    tell: Callable[[str], None] = lambda name: None,
) -> tuple[GenerationMemory, dict[str, ReportRecord]]:
    """Finds the maximum number of KV cache pages that fits on a device next to the weights and the temporary buffers.

    Returns the memory budget (bytes of each part, and the number of pages), and program name -> its memory report.

    Args:
      steps: the step programs, which are compiled here to measure their temporary buffers.
      sizes: static shapes of the programs. Their number of pages is ignored.
      limit: bytes that may be used on one device.
      drawing: which programs to compile: True for programs that sample, False for programs that take the most likely
        token.
      target: the devices to report on.
      tell: function that is called with the name of each program before the program is compiled.

    Raises:
      DoesNotFit: not even one page of the KV cache fits.
    """
    reports: dict[str, ReportRecord] = {}
    # The prompt step also samples a token at the end of a prompt, which adds little memory.
    shapes = {"one token each, drawn" if drawn else "one token each": (sizes.sequences, 1, drawn) for drawn in drawing}
    shapes["prompts"] = sizes.rows(1, sizes.chunk), sizes.chunk, drawing[-1]

    def measure(pages: int) -> dict[str, int]:
        extra_bytes = {}
        tried = dataclasses.replace(sizes, pages=pages)
        for name, (rows, width, drawn) in shapes.items():
            tell(name)
            reports[name] = steps.report(tried, rows, width, drawn, target)
            extra_bytes[name] = steps.extra_bytes(tried, reports[name])
        return extra_bytes

    most = sizes.sequences * sizes.table + 1
    pages, extra = settle(limit, steps.weight_bytes, steps.page_bytes, most, measure)
    result = GenerationMemory(
        limit, steps.weight_bytes, extra, steps.page_bytes, PAGE, pages, sizes.sequences, sizes.length
    )
    return result, reports


def _steps(
    args: argparse.Namespace,
    config: ConfigDict,
    devices: Sequence[jax.Device],
    base: str,
    pool_bytes: int | None = None,
) -> Steps:
    model = describe_model(config, devices, args.fsdp, args.tensor, args.dtype, base)
    return Steps(model, KV[args.kv] or model.precision.compute, pool_bytes)


def local_limit(args: argparse.Namespace, device: jax.Device) -> int:
    """Returns the bytes of the device that may be used: the value of --budget, by default all available bytes, or the
    fraction `CPU_SHARE` of them if the device is a CPU.
    """
    available = limit_bytes(device)
    default = int(CPU_SHARE * available) if device.platform == "cpu" else available
    return budget_of(args.budget or "", default, "--budget")


def plan(name: str, config: ConfigDict, target: Target, args: argparse.Namespace) -> GenerationPlan:
    """Returns the memory that generation with a config's model needs on a target, whose devices need not be present.

    Raises:
      DoesNotFit: the weights leave no memory for the KV cache.
      UserError: a flag or the config is wrong.
    """
    devices = target.devices()
    base = args.weights or UNQUANTIZED
    steps = _steps(args, config, devices, base, target.pool_bytes)
    longest = config.model.max_seq_len
    sizes = sizes_of(args, devices[0].platform, longest, longest, None)
    planned, reports = budget(steps, sizes, target.limit_bytes, (False, True), target)
    share = f"sharded over fsdp {args.fsdp} x tensor {args.tensor}" if args.fsdp * args.tensor > 1 else "one device"
    weights = jax.numpy.dtype(steps.model.precision.compute).name
    if base != UNQUANTIZED:
        weights = f"{format_of(base).summary}, the rest {weights}"
    facts = (
        f"{target.name}, {share}; weights {weights}, keys and values {steps.stored.name}",
        f"{plural(sizes.sequences, 'concurrent sequence')} of up to {sizes.length:,} positions, prompts in steps of "
        f"{plural(sizes.chunk, 'token')}",
    )
    return GenerationPlan(title_of(name), facts, planned, reports)


def open_engine(args: argparse.Namespace, source: Source, needed: int, count: int | None, drawing: bool) -> Engine:
    """Compiles the steps and loads the weights; returns an engine for requests of up to `needed` positions. On a
    terminal, prints the memory first.

    Args:
      count: number of requests; None if more requests may come.
      drawing: True if any request samples tokens.

    Raises:
      DoesNotFit: the weights leave no memory for the KV cache.
      UserError: a flag or the weights are wrong.
    """
    steps, device = _steps(args, source.config, jax.devices(), source.base), jax.local_devices()[0]
    limit = local_limit(args, device)
    sizes = sizes_of(args, device.platform, source.length, needed, count)
    console = Console(stderr=True)
    with console.status("compiling") as status:
        planned, _ = budget(
            steps,
            sizes,
            limit,
            (drawing,),
            targets.parse("local"),
            lambda name: status.update(f"compiling the step of {name}"),
        )
    if console.is_terminal:
        console.print(
            f"weights {human(planned.weights)}, pool {human(planned.pool_bytes)} for {planned.positions:,} positions, "
            f"largest step {human(planned.step)}; {human(planned.limit)} available",
            highlight=False,
        )
    devices = [one for one in steps.model.layout.mesh.local_devices if one.platform == "cpu"]
    base, weights = resident_term("load"), bytes_on_host(steps.model.shapes)
    parameters = HostTerm("load", "parameters", weights, "shards on CPU devices")
    cache = [
        HostTerm("sample", "KV cache", len(devices) * planned.pool_bytes, "pages x bytes of a page"),
        HostTerm("sample", "buffers of a step", len(devices) * planned.step, "the report of its program"),
    ]
    host = expect_host(
        [
            *(base, parameters, *reading_terms(source)),
            *(dataclasses.replace(term, phase="sample") for term in (base, parameters)),
            *(cache if devices else []),
        ]
    )
    warn_if_too_large(host, "give --dtype=bfloat16, a smaller --budget for the KV cache, or another computer")
    if console.is_terminal:
        console.print(host_line(host), highlight=False)
    with host_phase("load"), progress(None, "reading weights", "bytes", console) as bar:
        params = source.read(steps.model, bar.show)
    release_free_memory()
    return Engine(steps, params, dataclasses.replace(sizes, pages=planned.pages))


def open_scorer(args: argparse.Namespace, source: Source, longest: int) -> tuple[Scorer, Any]:
    """Returns the programs that score texts of up to `longest` tokens, and the weights on the devices.

    Raises:
      DoesNotFit: weights, KV cache and temporary buffers do not fit.
      UserError: a flag or the weights are wrong.
    """
    steps, device = _steps(args, source.config, jax.devices(), source.base), jax.local_devices()[0]
    limit = local_limit(args, device)
    scorer = Scorer(steps, longest, _chunk(device.platform, longest))
    if scorer.bytes > limit:
        raise DoesNotFit(
            f"scoring {longest:,} tokens takes {human(scorer.bytes)}, including {human(steps.weight_bytes)} "
            f"for the weights, but only {human(limit)} may be used: give a shorter --length or more "
            "devices (--tensor=N or --fsdp=N)"
        )
    with progress(None, "reading weights", "bytes") as bar:
        return scorer, source.read(steps.model, bar.show)
