"""Compares XLA's memory limit with what XLA prints, programs that were compiled under different limits, and the
estimated memory of XLA's scheduler with programs that were compiled without it.

    python tests/bench/xla_limit.py printed             # the formula beside XLA's own log line
    python tests/bench/xla_limit.py configs             # every shipped config on its documented target
    python tests/bench/xla_limit.py configs llama_8b --json=rows.json
    python tests/bench/xla_limit.py scheduler           # the estimate beside a compile without the scheduler

`printed` compiles a program that needs more than XLA allows: XLA then logs the limit of its rematerialization pass, the
limit of `memory.peak.xla_passes` plus the results. It does so for several slop factors, memory fractions and donated
arguments. Exit code 1 if a figure differs by a byte.

`configs` compiles each config for its target under three assumptions about the device's memory: 80 % of the GPU, which
XLA takes for a GPU that is not present; jax's pool at its default of 0.75; and the pool of `bytescope train` at 0.92.

`scheduler` compiles each config with and without the latency-hiding scheduler. It prints the temporary bytes of both,
the estimate of `memory.peak.memory_order` for the first, its seconds, and the findings about XLA's passes.
"""

import argparse
import dataclasses
import itertools
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from interleave import versions

from bytescope.memory import cli
from bytescope.memory.analysis import report_of
from bytescope.memory.devices import compiler, compiler_log, targets
from bytescope.memory.findings import compiler_findings
from bytescope.memory.findings.finding_rules import RULES
from bytescope.memory.peak import memory_order
from bytescope.memory.units import human
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.plan.config_factory import build_program, prepare_program
from bytescope.train.program import config_files

SIZE, LAYERS = 32768, 16  # float32 [SIZE, SIZE] is 4 GiB
SLOPS, FRACTIONS = (50, 95, 125), ("0.5", "0.75", "0.92")
COMPILER_FINDINGS = [rule.__name__ for rule in RULES if rule.__module__ == compiler_findings.__name__]
PRINTED = re.compile(r"Can't reduce memory use below \S+ \((\d+) bytes\)")


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Yields a list that holds the compiler's log, from file descriptor 2, after the block."""
    log: list[str] = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            log.append(file.read().decode(errors="replace"))


def step(x_DD: jax.Array, w_DD: jax.Array) -> jax.Array:
    """A chain of matmuls that reads every activation again at its end: x [D, D], w [D, D] -> [D, D]."""
    activations, h_DD = [], x_DD
    for _ in range(LAYERS):
        h_DD = jnp.sin(h_DD @ w_DD)
        activations.append(h_DD)
    for h_DD in reversed(activations):
        x_DD = jnp.tanh((x_DD * h_DD) @ w_DD)
    return x_DD


def printed() -> int:
    """Compiles `step` for every slop factor, fraction and donation; prints both figures. Returns the exit code."""
    wrong = 0
    print(f"{'donated':8} {'slop':>4} {'fraction':>8} {'limit + results':>16} {'printed by XLA':>16}")
    for donated, slop, fraction in itertools.product((False, True), SLOPS, FRACTIONS):
        target = targets.parse(f"h100@{fraction}")
        place = jax.sharding.SingleDeviceSharding(target.devices()[0])
        array = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=place)
        lowered = jax.jit(step, donate_argnums=(0,) if donated else ()).lower(array, array)
        with compiler_log.REDIRECTING, captured_log() as log:  # the lock keeps the package from holding the log back
            compilation = compiler.compile_lowered(
                lowered, options={compiler.SLOP: slop}, device_memory_bytes=target.pool_bytes
            )
        report = report_of(compilation, target=target)
        computed = (report.xla_budget.limit_bytes or 0) + (report.xla.output_bytes or 0)
        found = PRINTED.search(log[0])
        # Above the limit XLA is silent: the program needs no more than it allows.
        needed = (report.xla.temp_bytes or 0) + (report.xla.output_bytes or 0)
        right = int(found[1]) == computed if found else needed <= computed
        wrong += not right
        shown = found[1] if found else "nothing"
        print(f"{donated!s:8} {slop:4} {fraction:>8} {computed:16} {shown:>16} {'' if right else 'DIFFERS'}")
    return 1 if wrong else 0


def configs(names: list[str], path: Path | None) -> int:
    """Compiles the configs under three sizes of the device's memory; prints one line per program. Returns the exit
    code."""
    rows = []
    for name in names or sorted(config_files.purposes()):
        if (known := documented(name)) is None:
            continue
        args, target = known
        for label, judged in (
            ("80 %", dataclasses.replace(target, memory_fraction=None)),
            ("0.75", targets.parse(f"{target.name}@0.75")),
            ("0.92", targets.parse(f"{target.name}@0.92")),
        ):
            began = time.perf_counter()
            program = build_program(name, args.overrides, target)
            compilation, _ = prepare_program(program, judged, config_files.load_flat(name, args.overrides)).compile()
            report = report_of(compilation, target=judged, seconds=True)
            row = {
                "config": name,
                "target": target.name,
                "memory": label,
                "allocated_bytes": report.allocated_bytes,
                "peak_bytes": report.peak_bytes,
                "temp_bytes": report.xla.temp_bytes,
                "xla_limit_bytes": report.xla_budget.limit_bytes,
                "predicted_s": report.prediction.get("seconds"),
                "verdict": report.verdict,
                "compile_s": round(time.perf_counter() - began, 1),
            }
            rows.append(row)
            seconds = f"{row['predicted_s']:.3f} s" if row["predicted_s"] else "-"
            sizes = (human(row[key]) for key in ("allocated_bytes", "temp_bytes", "xla_limit_bytes"))
            words = [f"{what} {size:>10}" for what, size in zip(("allocated", "temp", "limit"), sizes)]
            print(f"{name:16} {target.name:10} {label:>5}", *words, f"{seconds:>9}", row["verdict"], flush=True)
            jax.clear_caches()
    if path:
        path.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
    return 0


def documented(name: str) -> tuple[argparse.Namespace, targets.Target] | None:
    """Returns flags and target of the report command in a config's file; None if it is not for an NVIDIA GPU."""
    path = next(path for path in config_files.shipped() if path.stem == name)
    command = re.search(r"^ *bytescope (report .*)$", path.read_text(), re.M)
    args = cli.parse(shlex.split(command[1])) if command else None
    target = targets.parse(args.target, TRAIN_FRACTION) if args else None
    return (args, target) if args and target and target.platform == "cuda" else None


def scheduler(names: list[str], path: Path | None) -> int:
    """Compiles the configs with and without the latency-hiding scheduler; prints one line per config. Returns the exit
    code."""
    rows = []
    off = {compiler.DISABLED_PASSES: compiler.SCHEDULER_PASS}
    for name in names or sorted(config_files.purposes()):
        if (known := documented(name)) is None:
            continue
        args, target = known
        reports, seconds = [], 0.0
        for options in ({}, off):
            program = build_program(name, args.overrides, target)
            flat = config_files.load_flat(name, args.overrides)
            with compiler.trial_options(options):
                compilation, _ = prepare_program(program, target, flat).compile()
            reports.append(report_of(compilation, target=target, seconds=True))
            if not options:
                began = time.perf_counter()
                memory_order.find(compilation.program.module)
                seconds = time.perf_counter() - began
        on, without = reports
        row = {
            "config": name,
            "target": target.name,
            "peak_bytes": on.peak_bytes,
            "temp_bytes": on.xla.temp_bytes,
            "estimated_bytes": on.xla_budget.scheduler_bytes,
            "temp_bytes_without": without.xla.temp_bytes,
            "predicted_s": on.prediction.get("seconds"),
            "predicted_s_without": without.prediction.get("seconds"),
            "margin_bytes": on.xla_budget.margin_bytes,
            "estimate_s": round(seconds, 2),
            "findings": [finding.kind for finding in on.findings if finding.kind in COMPILER_FINDINGS],
        }
        rows.append(row)
        keys = ("temp_bytes", "temp_bytes_without", "estimated_bytes", "margin_bytes")
        words = [f"{key.removesuffix('_bytes')} {human(row[key])}" for key in keys]
        print(f"{name:16} {target.name:12}", *words, f"{row['estimate_s']} s", *row["findings"], flush=True)
        jax.clear_caches()
    if path:
        path.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
    return 0


def main() -> int:
    """Runs the comparison that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("printed", "configs", "scheduler"))
    parser.add_argument("names", nargs="*", help="configs (default: all shipped configs)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    args = parser.parse_args()
    if args.what == "printed":
        return printed()
    return (configs if args.what == "configs" else scheduler)(args.names, args.json)


if __name__ == "__main__":
    sys.exit(main())
