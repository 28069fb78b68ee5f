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
--details. Those of the list's programs were read by a person (gallery_findings.py): one that nobody has read, and one
that was expected and is not found, are marked. Exit code 1 where a figure or a finding differs or a program failed.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gallery_findings import expected
from interleave import versions

HERE = Path(__file__).resolve().parent
# Program -> whether it is one for several devices: those are compiled for eight too.
PROGRAMS = {
    "linen_models:mnist": False, "linen_models:resnet50": False, "linen_models:gpt": False,
    "linen_models:seq2seq": False, "linen_models:vae": False, "linen_models:decode": False,
    "linen_sharded:fsdp": True,
    "nnx_models:transformer": False, "nnx_models:functional": False,
    "equinox_models:mlp": False, "equinox_models:gpt": False, "equinox_models:neural_ode": False,
    "haiku_models:transformer": False, "haiku_models:resnet18": False,
    "plain_jax:linear": False, "plain_jax:rnn": False, "plain_jax:decode": False, "plain_jax:decode_kept": False,
    "plain_jax:dqn": False, "plain_jax:gan": False, "plain_jax:accumulate": False, "plain_jax:solver": False,
    "parallel:pmap": True, "parallel:tensor_parallel": True, "parallel:ring": True, "parallel:data_parallel": True,
    "parallel:tensor_parallel_decode": True,
    "pallas_kernels:softmax": False, "pallas_kernels:gated": False,
    "numpyro_models:svi": False, "numpyro_models:nuts": False, "numpyro_models:chains": False,
    "mctx_search:muzero": False,
    "graph_networks:interaction": False,
    "model_libraries:qwen3_train": True, "model_libraries:qwen3_decode": False, "model_libraries:vit": False,
}
TARGETS, SHARDED = ("cpu", "h200"), ("h100:8",)
# The compiler's own figures come as MiB with a few digits.
EQUAL = 1e-3
MIB = 2**20


@dataclasses.dataclass(eq=False)
class Row:
    """One program on one target. All sizes are bytes of one device; `failed` has a line where there is no report."""

    program: str
    target: str
    failed: str = ""
    seconds: float = 0.0
    peak: int = 0
    allocated: int = 0
    breakdown: dict[str, int] = dataclasses.field(default_factory=dict)
    adds_up: bool = False
    xprof: tuple[float, float] | None = None
    placed: float = 1.0
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    roles: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    largest: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    unplaced: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def equal(self) -> bool | None:
        """Whether XProf has the same peak and allocated bytes, None where it was not asked."""
        if self.xprof is None:
            return None
        return all(abs(own - other) <= EQUAL * other for own, other in zip((self.peak, self.allocated), self.xprof))

    @property
    def unread(self) -> list[str]:
        """Kinds that were found and that nobody has read; none of a program that is not on the list."""
        return sorted({one["kind"] for one in self.findings} - set(self._expected)) if self._is_listed else []

    @property
    def missed(self) -> list[str]:
        """Kinds that a reader of the program expects and that were not found."""
        return sorted(set(self._expected) - {one["kind"] for one in self.findings})

    @property
    def held(self) -> bool:
        return not (self.failed or not self.adds_up or self.equal is False or self.unread or self.missed)

    @property
    def _is_listed(self) -> bool:
        return self.program in PROGRAMS and self.target in (*TARGETS, *SHARDED)

    @property
    def _expected(self) -> Mapping[str, str]:
        return expected(self.program, self.target) if self._is_listed else {}


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
        sys.path.insert(0, str(HERE / "programs"))
        loaded = importlib.import_module(module)
    return getattr(loaded, function)


def read(name: str, target: str, folder: Path) -> Row:
    """The row of a program, its HloProto left in the folder for XProf."""
    from bytescope.memory.analyze import report_of
    from bytescope.memory.program import compiled_for

    row = Row(name, target)
    began = time.perf_counter()
    try:
        step, args, *rest = load(name)()
        compilation, found = compiled_for(step, args, target="cpu:1" if target == "cpu" else target,
                                          options=rest[0] if rest else None)
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


def fill(row: Row, report: Any) -> None:
    """Writes what a report says into the row."""
    from bytescope.memory.hlo.sources import OUTSIDE, kind_of

    rows = {name: size for name, size in report.breakdown.items() if size}
    held: Counter[str] = Counter()
    live = sorted((b for b in report.buffers if b.at_peak and b.memory == "device"), key=lambda b: -b.bytes)
    for buffer in live:
        held[buffer.category] += buffer.bytes
    own = {name: size for name, size in rows.items() if name != "fragmentation"}
    row.peak, row.allocated, row.breakdown = report.peak_bytes, report.allocated_bytes, rows
    row.adds_up = (sum(own.values()) == report.peak_bytes and sum(rows.values()) == report.allocated_bytes
                   and own == {name: size for name, size in held.items() if size})
    made = [b for b in live if b.phase != "argument"]
    lost = [b for b in made if kind_of(b.source.rpartition(":")[0]) == OUTSIDE or not b.source]
    row.placed = 1 - sum(b.bytes for b in lost) / max(sum(b.bytes for b in made), 1)
    row.findings = [dataclasses.asdict(finding) for finding in report.findings]
    roles = defaultdict(list)
    for buffer in report.buffers:
        if buffer.phase == "argument":
            roles[buffer.category].append(buffer.name)
    row.roles = dict(roles)
    row.largest, row.unplaced = [told(b) for b in live[:10]], [told(b) for b in lost[:5]]
    row.notes = list(report.notes)


def told(buffer: Any) -> dict[str, Any]:
    keys = ("name", "bytes", "dtype", "shape", "category", "phase", "component", "module", "op_name", "source")
    return {key: getattr(buffer, key) for key in keys}


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

    found = {row: path for row in rows
             if (path := folder / f"{row.program}@{row.target}.pb".replace("/", "_")).exists()}
    for row, figures in zip(found, memory_viewer([path.read_bytes() for path in found.values()], folder / "xprof")):
        row.xprof = figures


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| program | target | peak | rows of at least 1 % | adds up | XProf | placed | findings | s |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if row.failed:
            lines.append(f"| `{row.program}` | `{row.target}` | {row.failed.replace('|', ' ')} | | | | | | |")
            continue
        parts = ", ".join(f"{name} {size / row.peak:.0%}" for name, size in
                          sorted(row.breakdown.items(), key=lambda item: -item[1]) if size >= 0.01 * row.peak)
        equal = {True: "equal", False: "**differs**", None: "-"}[row.equal]
        kinds = [f"{one['kind']} {size(one['bytes'])}{' **unread**' if one['kind'] in row.unread else ''}"
                 for one in row.findings]
        kinds = ", ".join([*kinds, *(f"**missed** {kind}" for kind in row.missed)]) or "-"
        lines.append(f"| `{row.program}` | `{row.target}` | {size(row.peak)} | {parts} | "
                     f"{'yes' if row.adds_up else '**no**'} | {equal} | {row.placed:.1%} | {kinds} | "
                     f"{row.seconds:.1f} |")
    return "\n".join(lines)


def size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.2f} MiB"


def save(rows: Sequence[Row], path: Path | None) -> None:
    """Writes what there is so far."""
    if path:
        path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


def details(row: Row) -> str:
    """What a person reads to judge a row: findings in full, roles of the arguments, what has no place."""
    lines = [f"\n{row.program} on {row.target}  peak {size(row.peak)}"]
    lines += [f"  {one['kind']}: {one['message']}. {one['remedy']}" for one in row.findings]
    lines += [f"  {role}: {', '.join(folded(names))}" for role, names in row.roles.items()]
    lines += [f"  at peak {size(b['bytes']):>11} {b['dtype']}{b['shape']} {b['category']} {b['phase']} "
              f"{b['module'] or b['component']} {b['name']} {'/'.join(b['source'].split('/')[-2:])}"
              for b in row.largest[:6]]
    lines += [f"  without a place {size(b['bytes'])} {b['dtype']}{b['shape']} {b['name']} {b['op_name']}"
              for b in row.unplaced]
    return "\n".join([*lines, *(f"  note: {note}" for note in row.notes)])


def folded(paths: Iterable[str]) -> list[str]:
    """Paths of arguments by their first two steps: `state.params[...] x 12`."""
    heads = Counter("".join(re.findall(r"^\w+|\.\w+|\[[^]]*\]", path)[:2]) for path in paths)
    return [f"{head} x {count}" if count > 1 else head for head, count in heads.items()]


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("programs", nargs="*", metavar="PROGRAM", help="default: all of the list")
    flags.add_argument("--targets", nargs="+", help=f"default: {' '.join(TARGETS)}, and {SHARDED[0]} where sharded")
    flags.add_argument("--details", action="store_true", help="findings in full, roles, the largest buffers")
    flags.add_argument("--json", type=Path, help="writes the rows to this file")
    flags.add_argument("--no-xprof", action="store_true", help="leaves the comparison with XProf out")
    flags.add_argument("--seconds", type=float, default=300, help="limit per program")
    flags.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = flags.parse_args()
    if asked.child:
        for name in asked.programs:
            print(json.dumps(dataclasses.asdict(read(name, asked.targets[0], asked.child))), flush=True)
        return 0
    names = asked.programs or list(PROGRAMS)
    rows = []
    with tempfile.TemporaryDirectory(prefix="gallery-") as name:
        folder = Path(name)
        for target, group in batches(names, asked.targets):
            for row in collect(target, group, folder, asked.seconds):
                rows.append(row)
                save(rows, asked.json)
                print(f"{row.program} {row.target}: {row.failed or size(row.peak)} ({row.seconds:.1f} s)",
                      file=sys.stderr, flush=True)
        if not asked.no_xprof:
            ask_xprof(rows, folder)
    rows.sort(key=lambda row: names.index(row.program))
    print(table(rows))
    if asked.details:
        print("\n".join(map(details, rows)))
    print(f"\n{sum(row.held for row in rows)} of {len(rows)} held. {versions()}")
    save(rows, asked.json)
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
