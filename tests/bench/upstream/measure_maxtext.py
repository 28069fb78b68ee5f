"""Compiles MaxText's own step for described GPUs, with MaxText as installed and with the patch of a report.

The scripts of the reports use this module. It is also the process that compiles with one copy of MaxText:

    python tests/bench/upstream/measure_maxtext.py maxtext:llama2-7b h100:8 '[["remat_policy=full"]]'

It prints the figures of each list of MaxText's keys as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bytescope.memory.units import GIB

if TYPE_CHECKING:
    from bytescope.memory.compare.program_factory import ProgramFactory
    from bytescope.memory.devices.compiler import Compilation
    from bytescope.memory.records.report_record import ReportRecord

MODEL = "maxtext:llama2-7b"
TOKENS = 4096
FORWARD_CALL = 'custom_call_target="__cudnn$fmhaSoftmax"'
MARK = "figures: "


@dataclass(frozen=True)
class Figures:
    """One compiled step.

    Fields:
        allocated_bytes, temp_bytes: bytes on a device: all buffers; the temporary ones.
        forward_calls: calls of cuDNN's forward attention kernel in the compiled module. A call in the body of a loop
            counts once.
        recomputed: the FLOPs of recomputation divided by all FLOPs.
        seconds: predicted seconds of a step.
        flops: FLOPs of a device in a step. The body of a loop with an unknown number of turns counts once.
    """

    allocated_bytes: int
    temp_bytes: int
    forward_calls: int
    recomputed: float
    seconds: float
    flops: float


class CompiledStep(NamedTuple):
    """A compiled training step.

    Fields:
        report: its memory report.
        compilation: the compiled program.
        seconds: seconds to trace and compile it.
    """

    report: ReportRecord
    compilation: Compilation
    seconds: float


def parser_of(docstring: str) -> argparse.ArgumentParser:
    """Returns the parser of a report's script. Its description is the script's docstring."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100:8", help="described GPUs (default h100:8)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers; 0: as in the model (default 4)")
    return parser


def keys_of(layers: int) -> list[str]:
    """Returns MaxText's keys for one sequence per device and `layers` layers."""
    size = [f"max_target_length={TOKENS}", "per_device_batch_size=1"]
    return size + (["override_model_config=true", f"base_num_decoder_layers={layers}"] if layers else [])


def patch_of(script: str) -> str:
    """Returns the patch in the report beside a script: the only block of the language diff in its Markdown file."""
    report = Path(script).with_suffix(".md").read_text(encoding="utf-8")
    (patch,) = re.findall(r"^```diff\n(.*?)^```", report, flags=re.M | re.S)
    return patch


def copy_patched(patch: str, folder: Path) -> None:
    """Copies the installed MaxText to folder/maxtext and applies a patch. Exits with a message if it does not apply."""
    spec = importlib.util.find_spec("maxtext")
    if spec is None:
        sys.exit("MaxText is not installed: pip install -r tests/maxtext_requirements.txt in Python 3.12")
    (source,) = spec.submodule_search_locations or ()
    shutil.copytree(source, folder / "maxtext", ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
    done = subprocess.run(["git", "apply", "-p1"], cwd=folder, input=patch, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"the patch does not apply to {source}: {done.stderr.strip()}")


def measure(args: argparse.Namespace, variants: Sequence[str], patch: str = "", model: str = MODEL) -> list[Figures]:
    """Compiles one step for each variant in a new process and returns their figures.

    args: the arguments of `parser_of`. variants: MaxText's keys, such as "remat_policy=none". patch: the patch of a
    temporary copy of MaxText; "" for the installed one. model: a model of MaxText.
    """
    lists = [[*keys_of(args.layers), *variant.split()] for variant in variants]
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, JAX_PLATFORMS="cpu")
        if patch:
            copy_patched(patch, Path(folder))
            environment["PYTHONPATH"] = folder
        command = [sys.executable, __file__, model, args.target, json.dumps(lists)]
        done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        sys.exit(f"MaxText's step could not be compiled: exit code {done.returncode}")
    figures = [Figures(**values) for values in json.loads(lines[-1].removeprefix(MARK))]
    for variant, row in zip(variants, figures):
        print(cells(f"{variant}, {'patched' if patch else 'installed'}", row), flush=True)
    return figures


def print_head() -> None:
    """Prints the head of the table whose rows `measure` prints."""
    print("| step | allocated GiB | temp GiB | forward calls | recomputed | predicted ms |\n|---|---|---|---|---|---|")


def cells(name: str, row: Figures) -> str:
    sizes = f"{row.allocated_bytes / GIB:.2f} | {row.temp_bytes / GIB:.2f} | {row.forward_calls}"
    return f"| {name} | {sizes} | {row.recomputed:.1%} | {1000 * row.seconds:.1f} |"


def check(findings: dict[str, bool]) -> int:
    """Prints each finding and whether it holds. Returns the exit code: 1 if one of them does not hold."""
    for finding, holds in findings.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {finding}")
    return 0 if all(findings.values()) else 1


def compile_report(factory: ProgramFactory, overrides: Mapping[str, Any], target_name: str) -> CompiledStep:
    """Makes a training step with a factory, compiles it for described devices and returns its report.

    overrides: the factory's keys with their values, such as {"config": "maxtext:llama2-7b", "scan_layers": "false"}.
    """
    from bytescope.memory.analysis import report_of
    from bytescope.memory.devices import targets

    began = time.perf_counter()
    program = factory(overrides, targets.parse(target_name))
    compilation, target = program.compile()
    seconds = time.perf_counter() - began
    report = report_of(compilation, target=target, roles=program.roles, loop=program.loop, seconds=True)
    return CompiledStep(report, compilation, seconds)


def recomputed_share(report: ReportRecord) -> float:
    """Returns the FLOPs of recomputation divided by all FLOPs of a step."""
    flops = {phase: sum(work.get("flops", {}).values()) for phase, work in report.work.items()}
    return flops.get("recompute", 0) / sum(flops.values())


def compile_step(model: str, target_name: str, words: Sequence[str]) -> Figures:
    """Compiles MaxText's step with its keys `words` and returns its figures."""
    from bytescope.memory.adapters.maxtext import FACTORY
    from bytescope.memory.adapters.trainers import overrides_of

    step = compile_report(FACTORY, overrides_of(model, list(words)), target_name)
    return Figures(
        allocated_bytes=step.report.allocated_bytes,
        temp_bytes=step.report.xla.temp_bytes,
        forward_calls=step.compilation.executable.as_text().count(FORWARD_CALL),
        recomputed=recomputed_share(step.report),
        seconds=step.report.prediction["seconds"],
        flops=sum(sum(work.get("flops", {}).values()) for work in step.report.work.values()),
    )


def main() -> None:
    model, target, lists = sys.argv[1:]
    figures = [asdict(compile_step(model, target, words)) for words in json.loads(lists)]
    print(MARK + json.dumps(figures))


if __name__ == "__main__":
    main()
