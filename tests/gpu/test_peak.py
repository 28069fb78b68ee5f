"""Predicted against measured: the peak of every shipped config on the card at hand.

    python -m pytest tests/gpu/test_peak.py -s

Each config compiles, is read, and runs two steps in a process of its own, since an allocator's peak never
goes back. The table names every config: what does not fit or cannot run on one card says so.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memory import platform

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem not in ("__init__", "base"))
# The allocator rounds every buffer up to 256 bytes, and the batch of the next step may already be there.
TOLERANCE = 0.02
STEPS = 2

pytestmark = pytest.mark.skipif(platform.accelerator() != "cuda", reason="no NVIDIA card in this machine")

CHILD = """
import dataclasses, importlib, json, sys
from memory.platform import choose_platform
choose_platform()
import jax, jax.numpy as jnp
from memory import live, targets
from memory.analyze import report_of
from train import program as programs

name, steps = sys.argv[1], int(sys.argv[2])
config = importlib.import_module("configs." + name).get_config()
try:
    program = programs.build(config, jax.devices()[:1])
except ValueError as error:
    print(json.dumps({"cannot": str(error)})); sys.exit()
compilation = program.compile_for_report(exact=True)
target = targets.parse("local")
report = report_of(compilation, target=target)
out = {"predicted": report.allocated_bytes, "limit": report.limit_bytes, "verdict": report.verdict}
if report.fits:
    state = program.init()
    batch = {key: jax.device_put(jnp.zeros(value.shape, value.dtype), value.sharding)
             for key, value in program.batch_shapes.items()}
    for _ in range(steps):
        state, metrics = compilation.compiled(state, batch)
    jax.block_until_ready(state)
    out["live"] = dataclasses.asdict(live.sample(jax.local_devices()[0]))
    out["line"] = live.predicted_against_measured(report, live.sample(jax.local_devices()[0]))
print(json.dumps(out))
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One config's outcome: bytes, or the reason why there are none."""

    name: str
    predicted: int = 0
    measured: int = 0
    note: str = ""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted - self.measured) / self.measured

    def __str__(self) -> str:
        if self.note:
            return f"{self.name:14} {self.note}"
        return (f"{self.name:14} {self.predicted / 2**30:9.3f} {self.measured / 2**30:9.3f} "
                f"{100 * self.error:+8.2f} %")


CARD = """
import json
from memory.platform import choose_platform
choose_platform()
import jax, jax.numpy as jnp
from memory import live, targets
from memory.target_table import CHIPS

jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((512, 512))))
seen, target = live.sample(jax.local_devices()[0]), targets.parse("local")
pool = (jax.local_devices()[0].memory_stats() or {}).get("pool_bytes", 0)
chip = next((c for c in CHIPS.values() if c.kind == target.kind), None)
described = targets.parse(chip.name).limit_bytes if chip else None
print(json.dumps({"kind": target.kind, "bytes_limit": seen.limit_bytes, "described": described,
                  "card_used": seen.card_used_bytes, "card_total": seen.card_total_bytes, "pool": pool}))
"""


def run_child(code: str, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess:
    """Runs code in a fresh process that takes the card: the tests' conftest pins this one to the CPU."""
    pinned = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    env = {key: value for key, value in os.environ.items() if key not in pinned}
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, env=env, text=True,
                          capture_output=True, timeout=timeout)


def measure(name: str, steps: int = STEPS) -> dict:
    """What the child prints for one config; its error, on one line, if it fails."""
    done = run_child(CHILD, name, str(steps))
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def row_of(name: str, result: dict) -> Row:
    """The table's row of a child's result."""
    if "failed" in result:
        return Row(name, note=f"FAILED: {result['failed']}")
    if "cannot" in result:
        return Row(name, note=f"cannot run on one card: {result['cannot']}")
    if "live" not in result:
        sizes = [f"{result[key] / 2**30:.1f} GiB" for key in ("predicted", "limit")]
        return Row(name, note=f"does not fit: {sizes[0]} of {sizes[1]}")
    return Row(name, result["predicted"], result["live"]["peak_bytes"])


def test_the_measured_peak_is_the_predicted_one():
    results = {name: measure(name) for name in CONFIGS}
    rows = [row_of(name, result) for name, result in results.items()]
    print("\n" + f"{'config':14} {'predicted':>9} {'measured':>9} {'error':>10}   (GiB)")
    print("\n".join(map(str, rows)))
    failed = [row for row in rows if row.note.startswith("FAILED")]
    assert not failed, failed[0].note
    measured = [row for row in rows if not row.note]
    assert measured, "no shipped config fits this card"
    wrong = [str(row) for row in measured if abs(row.error) > TOLERANCE]
    assert not wrong, "\n".join(wrong)


def test_the_limit_is_the_allocators_own_and_the_context_is_what_the_table_says():
    """A described card's limit against the real one's; prints what calibrates CONTEXT_BYTES."""
    done = run_child(CARD)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{seen}")
    if seen["card_used"] and seen["pool"]:
        outside = (seen["card_used"] - seen["pool"]) / 2**20
        print(f"outside the pool (context and libraries): {outside:.0f} MiB")
    if seen["described"] is None:
        pytest.skip(f"{seen['kind']} is no row of memory/target_table.py")
    assert abs(seen["described"] - seen["bytes_limit"]) < 0.01 * seen["bytes_limit"]
