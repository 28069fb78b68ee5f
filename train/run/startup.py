"""The output of a run before the first step: model, batch, devices, kernels, and the memory and speed of the step."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.text import Text

from bytescope.memory.cost import flops
from bytescope.memory.devices.targets import parse
from bytescope.memory.findings.host_findings import with_host_memory
from bytescope.memory.hlo.jax_types import CompiledStage
from bytescope.memory.host.host_ledger import expect, ledger
from bytescope.memory.host.process_memory import release_free_memory
from bytescope.memory.records.host_record import HostMemory
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.report import host_view, report_page, report_text
from bytescope.memory.report.host_notice import resident_term
from bytescope.memory.view.console import put, safe
from bytescope.memory.view.text_layout import Prose
from bytescope.model.frozen import ROUTER_BIAS
from bytescope.model.quantized.weight import quantized_weights
from bytescope.train.checkpoints.workdir import write_atomically
from bytescope.train.data.tokenizer import ByteTokenizer
from bytescope.train.launch.failures import explained
from bytescope.train.launch.processes import Processes
from bytescope.train.plan import refusal
from bytescope.train.plan.config_factory import describe, prepare_program
from bytescope.train.plan.report_remedies import with_remedies
from bytescope.train.plan.run_memory import run_terms, step_terms
from bytescope.train.program.config_files import flatten
from bytescope.train.program.program import Program
from bytescope.train.program.program_settings import Settings
from bytescope.train.program.run_command import DEFAULT, UNKNOWN, Command
from bytescope.train.run import summary
from bytescope.train.user_errors import UserError
from bytescope.train.weights.leaves import parameters_of

if TYPE_CHECKING:  # importing this module imports grain, which takes time
    from bytescope.train.data.batches import Data

REPORT, PAGE = "memory.json", "memory.html"
# Maximum number of passes over the data without a warning: repeated tokens lose most of their value within about 16
# passes (Muennighoff et al. 2023, arXiv 2305.16264).
MAX_PASSES = 16


def show_program(console: Console, program: Program, data: str, *, verbose: bool = False) -> None:
    """Prints what is known before the program is compiled: model, batch, devices and mesh, kernels and remat policy.

    Args:
      data: description of the training data. Without `verbose` it is not shown for plain text (`data.format=text`).
      verbose: True to also show the jax version and why each kernel was chosen.
    """
    model, remat = program.model, program.config.remat
    (kernel, why), (matmul, how) = program.kernel, program.matmul
    total = sum(map(math.prod, parameters_of(model).values()))
    rows = [
        (
            "model",
            f"{summary.count(total)} parameters{_describe_trained(program)}: width {model.d_model:,}, layers "
            f"{model.n_layers}, heads {model.n_heads}, vocabulary {model.vocab_size:,}",
        ),
        ("batch", str(program.batch)),
        ("devices", _describe_devices(program)),
        (
            "program",
            f"{program.config.precision.preset} precision, remat {', '.join((*remat.layers, remat.policy))}, "
            f"attention {kernel}, matmuls {matmul}, loss {program.config.loss.kind}",
        ),
        ("remat", program.decided),
    ]
    init = program.config.init
    if init.adapter:
        rows.append(("adapters", f"from {init.adapter}"))
    if verbose or program.config.data.format != "text":  # it has the number of unmasked targets and the fill of rows
        rows.append(("data", data))
    if verbose:
        rows += [
            ("attention", f"{kernel}: {why}"),
            ("products", f"{matmul}: {how}"),
            ("jax", jax.__version__),
        ]
    summary.show(console, rows)


def passes(program: Program, sequences: int) -> str:
    """Returns text that says how often the run will read the training data, such as "300 sequences to train on, 100
    updates read each 2.7 times". `sequences`: number of sequences in the training data."""
    steps = program.config.train.steps
    share = steps * program.batch.global_rows / sequences
    if share < 1:
        read = f"read {100 * share:.2g} % of them"
    else:
        read = f"read each {share:,.{0 if share >= 10 else 1}f} times"
    return (
        f"{sequences:,} sequence{'s' if sequences > 1 else ''} to train on, {steps:,} update"
        f"{'s' if steps > 1 else ''} {read}"
    )


def _describe_trained(program: Program) -> str:
    if all(
        name.endswith(ROUTER_BIAS) for name in program.frozen
    ):  # router biases have no gradient, but updates move them
        return ""
    lora = program.lora
    number = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.state.params))
    if lora is None:
        return f", {number:,} trained (optimizer.freeze)"
    base = f" over {program.config.lora.base}" if quantized_weights(program.abstract()) else ""
    return f", {number:,} trained (LoRA rank {lora.rank} on {' '.join(lora.targets)}{base})"


def _describe_devices(program: Program) -> str:
    devices = program.mesh.devices.ravel()
    axes = " x ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items() if size > 1)
    mesh = f", mesh {axes}, {program.config.mesh.strategy}" if axes else ""
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} x {devices[0].device_kind}{processes}{mesh}"


@contextlib.contextmanager
def progress_lines(console: Console, what: str, verbose: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that prints a line of progress. On a terminal the line is shown beside a spinner, after `what`.
    Elsewhere it is printed only if `verbose` is set. `what`: the activity, such as the compilation."""
    if not console.is_terminal:
        yield lambda line: put(Prose(line), console) if verbose else None
        return
    with console.status(Text(what)) as status:
        yield lambda line: status.update(Text(f"{what}: {safe(line)}"))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled step, and its memory report.

    Fields:
      step: the compiled step.
      report: its memory report.
      flops_ratio: executed FLOPs (with recomputation) divided by model FLOPs, which equals HFU / MFU.
      seconds: compile time, in seconds.
    """

    step: CompiledStage
    report: ReportRecord
    flops_ratio: float
    seconds: float = 0.0


def compile_step(program: Program, console: Console, command: Command = UNKNOWN) -> Compiled:
    """Compiles the step and makes its memory report. Prints the predicted memory as a bar, and the predicted speed.

    If the step is in the persistent compilation cache, it is not compiled again. Its report then says that buffer
    lifetimes are derived, because a cached program has no heap trace. `command`: the command of this start. With
    --verbose the whole report is printed.

    Raises:
      ValueError: the step cannot run, for one of the reasons listed in `Program.compile_for_report`.
    """
    held = [resident_term(phase) for phase in ("trace", "compile", "analyze")]  # replace the measured constants
    began = time.perf_counter()
    with console.status("compiling the step"):
        compilation = program.compile_for_report()
    seconds = time.perf_counter() - began
    work = flops.count(compilation.jaxpr)
    expect([*step_terms(program.mesh.devices.flat[0].platform, compilation.jaxpr), *held])
    target = parse("local")
    prepared = prepare_program(program, target, flatten(program.config))
    model_flops = round(prepared.model_flops(work.model_flops))
    subject = describe(command.config or DEFAULT, command.overrides, prepared, model_flops)
    report = with_remedies(prepared.report_of(compilation, target, subject=subject, seconds=True))
    summary.show(console, [("memory", summary.memory(report)), ("speed", summary.speed(report))])
    if command.verbose:
        put(report_text.render(report), console)
    return Compiled(compilation.executable, report, work.hardware_flops / max(model_flops, 1), seconds)


def write_report(report: ReportRecord, workdir: Path) -> Path:
    """Writes a memory report into a run directory, as JSON and as an HTML page that opens offline. Returns the path of
    the page."""
    write_atomically(workdir / REPORT, json.dumps(report.to_json(), indent=1) + "\n")
    write_atomically(workdir / PAGE, report_page.render(report))
    return workdir / PAGE


def compile_or_refuse(
    program: Program, command: Command, workdir: Path, console: Console, processes: Processes
) -> Compiled:
    """Compiles the step and writes its memory report into the run directory. Returns the compiled step if it fits in
    device memory.

    Raises:
      DoesNotFit: the step needs more memory than the device has. The message has advice.
      UserError: the step cannot run, for one of the reasons listed in `Program.compile_for_report`.
    """

    def advice() -> list[str]:
        return refusal.advice_without_compiling(refusal.report_without_compiling(program), command)

    try:
        with explained(None, program.mesh.local_devices[0], advice):
            compiled = compile_step(program, console, command)
    except UserError:
        raise
    except ValueError as error:  # from `Program.compile_for_report`
        raise UserError(str(error)) from error
    host = _expect_run(program, compiled.report)
    compiled = dataclasses.replace(compiled, report=with_host_memory(compiled.report, host))
    summary.show(console, [("host", host_view.line(host))])
    page = write_report(compiled.report, workdir) if processes.first else workdir
    summary.show(console, [("report", str(page))])
    if compiled.report.fits is False:
        with progress_lines(console, "compiling what might fit", True) as tell:
            refusal.refuse(compiled.report, program, command, tell, compiled.seconds)
    return compiled


def _expect_run(program: Program, report: ReportRecord) -> HostMemory:
    """Adds the terms of this run to the ledger of this process's host memory. Returns the ledger."""
    release_free_memory()  # memory freed after compiling
    terms = list(run_terms(program, report, len(program.mesh.local_devices)))
    expect([*terms, *map(resident_term, dict.fromkeys(term.phase for term in terms))])
    return ledger()


# Dtype -> its matrix units, best first. jax computes float32 products on TF32 units.
_UNITS = {"float32": ("tf32", "fp32"), "bfloat16": ("bf16",), "float16": ("fp16",)}


def peak_flops(program: Program) -> float | None:
    """Returns the peak dense FLOP/s of one device in the compute dtype. Returns None if the device is not in
    memory/devices/chips.py."""
    known = parse("local").peak_flops
    units = _UNITS.get(jnp.dtype(program.precision.compute).name, ())
    return next((known[unit] for unit in units if unit in known), None)


def doubtful_settings(settings: Settings, data: "Data", read: int) -> list[str]:
    """Returns warnings about settings that are probably mistakes, one line each.

    `read`: number of sequences that the whole run reads.
    """
    lines, steps, vocabulary, optimizer = [], settings.steps, settings.model.vocab_size, settings.optimizer
    if optimizer.warmup_steps > steps:
        lines.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is more than train.steps={steps}: the learning rate "
            f"never reaches {optimizer.learning_rate:g}; lower warmup_steps or raise train.steps"
        )
    passes = read / len(data.train)
    if passes > MAX_PASSES:
        lines.append(
            f"train.steps={steps} reads each sequence {passes:,.0f} times, and after {MAX_PASSES} passes a model only "
            f"memorizes the data: set train.steps={max(int(steps * MAX_PASSES / passes), 1)}, or give more data"
        )
    if data.tokenizer.name == ByteTokenizer.name and vocabulary != data.vocab_size:
        lines.append(
            f"data.tokenizer=bytes has {data.vocab_size} different tokens, but model.vocab_size={vocabulary}: set "
            f"data.tokenizer to the model's tokenizer.json, or model.vocab_size={data.vocab_size}"
        )
    return lines
