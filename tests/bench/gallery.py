"""Programs that are not ours, read on several targets: one table of peak, rows, places and findings.

    python tests/bench/gallery.py
    python tests/bench/gallery.py linen_models:gpt plain_jax:decode --targets h200 --details
    python tests/bench/gallery.py path/to/train.py:program --targets cpu h100:8 --json=found.json

A program is `module:function` of tests/bench/programs/ (or of what can be imported), or `file.py:function`; the
function gives (step, arguments) or (step, arguments, options of jax.jit). Without names it is the list `PROGRAMS`.
Libraries that a program needs and that are not installed make its row say so.

Each program is traced and compiled in a process with as many CPU devices as the target has devices, so that meshes
over `jax.devices()` have the target's size. The columns: `adds up`: the rows are the peak, and with fragmentation the
allocated bytes, to the byte; `XProf`: its memory viewer has the same two figures for the same proto; `placed`: share of
the peak's bytes, arguments left out, that have a line of source to open; findings by their kinds, in full under
--details. Those of the list's programs were read by a person (gallery_list.py): one that nobody has read, and one
that was expected and is not found, are marked. Exit code 1 where a figure or a finding differs or a program failed.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gallery_list import PROGRAMS, SHARDED, TARGETS
from gallery_rows import Row, details, fill, size, table
from interleave import versions

ONE_DEVICE = Path(__file__).resolve().parent


def load(name: str) -> Any:
    """The function behind `module:function` or `file.py:function`."""
    module, _, function = name.rpartition(":")
    if module.endswith(".py"):
        path = Path(module).resolve()
        sys.path.insert(0, str(path.parent))
        found = importlib.util.spec_from_file_location(path.stem, path)
        loaded = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = loaded
        found.loader.exec_module(loaded)
    else:
        sys.path.insert(0, str(ONE_DEVICE / "programs"))
        loaded = importlib.import_module(module)
    return getattr(loaded, function)


def read(name: str, target: str, folder: Path) -> Row:
    """The row of a program, its HloProto left in the folder for XProf."""
    from bytescope.memory.analysis import report_of
    from bytescope.memory.program.compilation import compiled_for

    row = Row(name, target)
    began = time.perf_counter()
    try:
        step, args, *rest = load(name)()
        compilation, found = compiled_for(
            step, args, target="cpu:1" if target == "cpu" else target, options=rest[0] if rest else None
        )
        report = report_of(compilation, target=found)
    except ModuleNotFoundError as error:
        row.failed = f"{error.name} is not installed"
    except Exception as error:
        row.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        traceback.print_exc()
    else:
        fill(row, report)
        if compilation.proto:
            (folder / f"{name}@{target}.pb".replace("/", "_")).write_bytes(compilation.proto)
    row.seconds = round(time.perf_counter() - began, 2)
    return row


def batches(asked: Sequence[str], targets: Sequence[str] | None) -> Iterator[tuple[str, list[str]]]:
    """(target, programs) of a process each: programs of one file together."""
    groups = defaultdict(list)
    for name in asked:
        own = targets or (*TARGETS, *(SHARDED if PROGRAMS.get(name) else ()))
        for target in own:
            groups[name.rpartition(":")[0], target].append(name)
    for (_, target), names in groups.items():
        yield target, names


def collect(target: str, names: Sequence[str], folder: Path, limit: float) -> Iterator[Row]:
    """The rows of programs, read in a process of their own; one that ends the process is a row too."""
    left = list(names)
    devices = 1
    for part in target.partition(":")[2].split("x"):
        devices *= int(part or 1)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PJRT_NPROC": "64"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cached program has no heap trace
    environment.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    while left:
        command = [sys.executable, __file__, *left, "--child", str(folder), "--targets", target]
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        try:
            out, err = process.communicate(timeout=limit * len(left))
            why = f"exit code {process.returncode}: {(err.strip().splitlines() or [''])[-1][:200]}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            why = f"not finished after {limit * len(left):.0f} s"
        sys.stderr.write(err)
        for line in out.splitlines():
            if line.startswith('{"program"'):
                row = Row(**json.loads(line))
                left.remove(row.program)
                yield row
        if left:
            yield Row(left.pop(0), target, failed=why)


def ask_xprof(rows: Iterable[Row], folder: Path) -> None:
    """Puts XProf's figures into the rows whose protos are in the folder."""
    from support.oracles import memory_viewer

    found = {
        row: path for row in rows if (path := folder / f"{row.program}@{row.target}.pb".replace("/", "_")).exists()
    }
    for row, figures in zip(found, memory_viewer([path.read_bytes() for path in found.values()], folder / "xprof")):
        row.xprof = figures


def save(rows: Sequence[Row], path: Path | None) -> None:
    """Writes what there is so far."""
    if path:
        path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


def compiled(asked: argparse.Namespace) -> list[Row]:
    """The rows of all programs and targets that are asked for."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gallery-") as name:
        folder = Path(name)
        for target, group in batches(asked.programs or list(PROGRAMS), asked.targets):
            for row in collect(target, group, folder, asked.seconds):
                rows.append(row)
                save(rows, asked.json)
                print(
                    f"{row.program} {row.target}: {row.failed or size(row.peak)} ({row.seconds:.1f} s)",
                    file=sys.stderr,
                    flush=True,
                )
        if not asked.no_xprof:
            ask_xprof(rows, folder)
    return rows


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("programs", nargs="*", metavar="PROGRAM", help="default: all of the list")
    flags.add_argument("--targets", nargs="+", help=f"default: {' '.join(TARGETS)}, and {SHARDED[0]} where sharded")
    flags.add_argument("--details", action="store_true", help="findings in full, roles, the largest buffers")
    flags.add_argument("--json", type=Path, help="writes the rows to this file")
    flags.add_argument("--no-xprof", action="store_true", help="leaves the comparison with XProf out")
    flags.add_argument("--seconds", type=float, default=300, help="limit per program")
    flags.add_argument(
        "--saved", nargs="+", type=Path, metavar="JSON", help="shows what --json wrote; compiles nothing"
    )
    flags.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = flags.parse_args()
    if asked.child:
        for name in asked.programs:
            print(json.dumps(dataclasses.asdict(read(name, asked.targets[0], asked.child))), flush=True)
        return 0
    if asked.saved:
        rows = [Row(**row) for path in asked.saved for row in json.loads(path.read_text())]
    else:
        rows = compiled(asked)
    order = [*PROGRAMS, *asked.programs]
    rows.sort(key=lambda row: order.index(row.program) if row.program in order else len(order))
    print(table(rows))
    if asked.details:
        print("\n".join(map(details, rows)))
    print(f"\n{sum(row.held for row in rows)} of {len(rows)} held. {versions()}")
    save(rows, asked.json)
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
