"""Verdicts of programs under three allocators: jax's pool at 0.75 and at 0.92, and `cuda_async`.

    python tests/bench/verdicts.py configs                # every shipped config on its documented GPUs
    python tests/bench/verdicts.py configs llama_8b
    python tests/bench/verdicts.py programs               # third-party programs that take 60 to 90 % of a GPU
    python tests/bench/verdicts.py marin                  # published limits of one GH200 (marin-community/marin#5587)

A program is compiled once per fraction, because XLA plans with the size of the pool. `cuda_async` starts with the same
pool as the allocator at 0.75 (to 2 MiB), so it judges the program that was compiled for 0.75; its pool grows, so its
limit is the whole GPU minus the CUDA context. Rows in which a verdict differs from the verdict at 0.75 are marked.

`programs` needs the gallery's libraries (dm-haiku, diffrax). Exit code 1 if one of its peaks is not between 60 and 90 %
of the GPU's memory, or if a verdict of `marin` at `PUBLISHED_FRACTION` is not the published one.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "programs"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from gallery import load
from interleave import versions

from bytescope.memory import cli
from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.devices.targets import Target
from bytescope.memory.program.compilation import compiled_for
from bytescope.memory.units import GIB
from bytescope.train.plan.config_factory import build_program, prepare_program
from bytescope.train.program import config_files

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
FRACTIONS = (0.75, 0.92)
# Program -> (GPU, position of the batch among the arguments, its size).
PROGRAMS = {
    "linen_models:gpt": ("rtx4090", 1, 55),
    "nnx_models:functional": ("a100-40g", 1, 108),
    "equinox_models:gpt": ("h100", 0, 284),
    "haiku_models:transformer": ("a100-40g", 1, 320),
    "linen_models:resnet50": ("rtx5090", 1, 576),
}
# (parameters, optimizer, whether the run succeeded). "About 16B" is published without more digits.
MARIN = ((10.657e9, "adam", True), (11.252e9, "adam", False), (12.986e9, "lion", True), (16e9, "lion", False))
# The issue does not state the memory fraction of its runs.
PUBLISHED_FRACTION = 0.95


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A program under one allocator. Sizes are bytes of one device."""

    program: str
    target: str
    allocator: str
    verdict: str
    predicted_bytes: int
    peak_bytes: int
    temp_bytes: int
    limit_bytes: int
    device_bytes: int
    compile_s: float


@contextlib.contextmanager
def cuda_async() -> Iterator[None]:
    """Chooses jax's allocator `cuda_async` inside the block, for targets that are parsed in it."""
    before = os.environ.get(ALLOCATOR)
    os.environ[ALLOCATOR] = "cuda_async"
    try:
        yield
    finally:
        os.environ.pop(ALLOCATOR)
        if before is not None:
            os.environ[ALLOCATOR] = before


def judge(name: str, place: str, compile_for: Any, fractions: Sequence[float] = FRACTIONS) -> list[Verdict]:
    """Returns the verdicts of a program under each allocator, and prints them on one line.

    place: the target without a fraction, such as "h100:8". compile_for: Target -> Compilation.
    """
    rows = []
    for fraction in fractions:
        target = targets.parse(f"{place}@{fraction}")
        began = time.perf_counter()
        compilation = compile_for(target)
        seconds = round(time.perf_counter() - began, 1)
        judged = [(f"{fraction}", target)]
        if fraction == FRACTIONS[0]:
            with cuda_async():
                judged.append(("cuda_async", targets.parse(f"{place}@{fraction}")))
        rows += [_verdict(name, allocator, compilation, each, seconds) for allocator, each in judged]
        jax.clear_caches()
    rows.sort(key=lambda row: row.allocator == "cuda_async")
    cells = [
        f"{row.allocator}: {row.verdict} ({row.predicted_bytes / GIB:.2f} of {row.limit_bytes / GIB:.2f})"
        for row in rows
    ]
    share = max(row.peak_bytes for row in rows) / rows[0].device_bytes
    changed = " CHANGES" if len({row.verdict for row in rows}) > 1 else ""
    print(f"{name:26} {place:14} peak {share:4.0%}  {'  '.join(cells)}{changed}", flush=True)
    return rows


def _verdict(name: str, allocator: str, compilation: Any, target: Target, seconds: float) -> Verdict:
    report = report_of(compilation, target=target)
    return Verdict(
        name,
        target.name,
        allocator,
        report.verdict,
        report.predicted_bytes,
        report.peak_bytes,
        report.xla.temp_bytes or 0,
        report.limit_bytes or 0,
        target.device_memory_bytes,
        seconds,
    )


def configs(names: Sequence[str]) -> list[Verdict]:
    """Judges shipped configs on every GPU for which their docstrings show a report. names: all configs if empty."""
    rows = []
    for name in names or sorted(config_files.purposes()):
        text = next(path for path in config_files.shipped() if path.stem == name).read_text()
        for command in re.findall(r"^ *bytescope (report .*)$", text, re.M):
            args = cli.parse(shlex.split(command))
            target = targets.parse(args.target)
            if target.platform != "cuda":
                continue
            program = build_program(name, args.overrides, target)
            flat = config_files.load_flat(name, args.overrides)

            def compile_for(judged: Target, program: Any = program, flat: Any = flat) -> Any:
                return prepare_program(program, judged, flat).compile()[0]

            rows += judge(name, target.name, compile_for)
    return rows


def with_batch(arguments: Sequence[Any], position: int, size: int) -> tuple[Any, ...]:
    """Returns a program's arguments with another batch size.

    position: which argument is the batch, a tree of arrays whose first axis is the batch size.
    """
    batch = arguments[position]
    old = jax.tree.leaves(batch)[0].shape[0]
    scaled = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) if leaf.shape[:1] == (old,) else leaf,
        batch,
    )
    return (*arguments[:position], scaled, *arguments[position + 1 :])


def programs(names: Sequence[str]) -> list[Verdict]:
    """Judges third-party programs with larger batches. names: all of `PROGRAMS` if empty."""
    rows = []
    for name in names or PROGRAMS:
        place, position, size = PROGRAMS[name]
        step, arguments, *options = load(name)()
        arguments = with_batch(arguments, position, size)

        def compile_for(target: Target, step: Any = step, arguments: Any = arguments, options: Any = options) -> Any:
            return compiled_for(step, arguments, target=target, options=options[0] if options else None)[0]

        rows += judge(f"{name}, batch {size}", place, compile_for)
    return rows


def marin(names: Sequence[str]) -> list[Verdict]:
    """Judges programs like those of marin#5587 on one GH200 with 96 GB. names: optimizers; all if empty."""
    import grug_moe

    rows = []
    for parameters, optimizer, ran in MARIN:
        if names and optimizer not in names:
            continue
        step, arguments = grug_moe.step_of(parameters, optimizer)
        name = f"{optimizer} {parameters / 1e9:.3f}B {'ran' if ran else 'failed'}"
        rows += judge(
            name,
            "gh200-96g",
            lambda target, step=step, arguments=arguments: compiled_for(step, arguments, target=target)[0],
            (*FRACTIONS, PUBLISHED_FRACTION),
        )
        print(f"{'':41} temporaries {rows[-1].temp_bytes / GIB:.2f} GiB", flush=True)
    return rows


def _is_wrong(what: str, row: Verdict) -> bool:
    if what == "programs":
        return not 0.6 <= row.peak_bytes / row.device_bytes <= 0.9
    ran = {f"{optimizer} {parameters / 1e9:.3f}B": ran for parameters, optimizer, ran in MARIN}
    published = ran.get(row.program.rpartition(" ")[0])
    return (
        row.allocator == f"{PUBLISHED_FRACTION}" and published is not None and (row.verdict != "exceeds") != published
    )


def main() -> int:
    """Judges the programs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("configs", "programs", "marin"))
    parser.add_argument("names", nargs="*", help="configs, programs or optimizers (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    args = parser.parse_args()
    rows = {"configs": configs, "programs": programs, "marin": marin}[args.what](args.names)
    print(versions())
    if args.json:
        args.json.write_text(
            json.dumps({"versions": versions(), "rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n"
        )
    wrong = [row for row in rows if _is_wrong(args.what, row)]
    for row in wrong:
        print(f"DIFFERS: {row.program} on {row.target}, {row.allocator}: {row.verdict}, peak {row.peak_bytes}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
