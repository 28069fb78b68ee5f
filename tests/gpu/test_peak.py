"""Predicted against measured: the peak of every shipped config on the card at hand.

    python -m pytest tests/gpu/test_peak.py -s

Each config compiles, is read, and runs two steps in a process of its own, since an allocator's peak never
goes back. The table names every config: what does not fit or cannot run on one card says so.
"""

import json
from pathlib import Path

import accuracy
import pytest
import rows

from bytescope.memory.devices import platform

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem not in ("__init__", "base"))

pytestmark = pytest.mark.skipif(platform.accelerator() != "cuda", reason="no NVIDIA card in this machine")

CARD = """
import json
from bytescope.memory.devices.platform import choose_platform
choose_platform(fraction=0.92)
import jax, jax.numpy as jnp
from bytescope.memory.devices import live, targets
from bytescope.memory.devices.chips import CHIPS

jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((512, 512))))
seen, target = live.sample(jax.local_devices()[0]), targets.parse("local")
pool = (jax.local_devices()[0].memory_stats() or {}).get("pool_bytes", 0)
chip = next((c for c in CHIPS.values() if c.kind == target.kind), None)
described = targets.parse(chip.name).limit_bytes if chip else None
print(json.dumps({"kind": target.kind, "bytes_limit": seen.limit_bytes, "described": described,
                  "card_used": seen.card_used_bytes, "card_total": seen.card_total_bytes, "pool": pool}))
"""


def measure(name: str) -> dict:
    """What tests/gpu/child.py answers for one config, as accuracy.py asks it."""
    return rows.answer_of(rows.Row(name, name, {"train.sample_tokens": "0"}).asked("local", False), timeout=900)


def test_the_measured_peak_is_the_predicted_one():
    print("\n" + rows.line_of(accuracy.HEADINGS, accuracy.WIDTHS))
    answers, lines = {}, {}
    for name in CONFIGS:
        answers[name] = measure(name)
        lines[name] = rows.line_of(accuracy.cells(rows.Row(name, name, {}), answers[name]), accuracy.WIDTHS)
        print(lines[name])
    failed = [lines[name] for name, answer in answers.items() if "failed" in answer]
    assert not failed, failed[0]
    assert any("measured" in answer for answer in answers.values()), "no shipped config fits this card"
    wrong = [lines[name] for name, answer in answers.items() if rows.verdict(answer) not in ("", "right")]
    assert not wrong, "\n".join(wrong)


def test_the_limit_is_the_allocators_own_and_the_context_is_what_the_table_says():
    """A described card's limit against the real one's; prints what calibrates CONTEXT_BYTES."""
    done = rows.run_code(CARD)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{seen}")
    if seen["card_used"] and seen["pool"]:
        outside = (seen["card_used"] - seen["pool"]) / 2**20
        print(f"outside the pool (context and libraries): {outside:.0f} MiB")
    if seen["described"] is None:
        pytest.skip(f"{seen['kind']} is no row of memory/devices/chips.py")
    assert abs(seen["described"] - seen["bytes_limit"]) < 0.01 * seen["bytes_limit"]
