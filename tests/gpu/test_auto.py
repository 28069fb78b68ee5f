"""`remat.policy=auto` on the card at hand: its step time at some budgets beside every fixed policy that fits there.

    python -m pytest tests/gpu/test_auto.py -s

All programs of a budget run in turn in one process, on one state, several rounds; the table has medians.
"""

import json

import pytest
from rows import run_code

from bytescope.memory.devices import platform

# By how much a plan may be slower than the best fixed policy: what medians of a few rounds are off by.
NOISE = 0.03
SHARES = (0.0, 0.2, 0.4, 0.7, 1.0)

pytestmark = pytest.mark.skipif(platform.accelerator() != "cuda", reason="no NVIDIA card in this machine")

CHILD = """
import json, statistics, sys, time
from bytescope.memory.devices.platform import choose_platform
choose_platform(fraction=0.92)
import jax, jax.numpy as jnp
from bytescope.memory.devices import targets
from bytescope.memory.analysis import report_of
from bytescope.train.program.config_files import load
from bytescope.train.plan.remat_auto import settled_program

config, shares, rounds = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
target = targets.parse("local")

def program(**remat):
    keys = [(f"remat.{key}", value) for key, value in remat.items()]
    return settled_program(load(config, [*keys, ("batch.micro", "16")]), jax.devices()[:1])

def compiled(made):
    done = made.compile_for_report(exact=True)
    return done.compiled, report_of(done, target=target).allocated_bytes

fixed = {}
for policy in ("full", "dots", "dots_no_batch", "minimal", "selective", "none"):
    fixed[policy] = compiled(program(policy=policy))
low, high = fixed["full"][1], min(fixed["none"][1], target.limit_bytes)
state, rows = program(policy="full").init(), []
batch = {key: jax.device_put(jnp.zeros(value.shape, value.dtype), value.sharding)
         for key, value in program(policy="full").batch_shapes.items()}
for share in shares:
    budget = round(low + share * (high - low))
    made = program(policy="auto", budget=str(budget))
    steps = {"auto": compiled(made), **{name: one for name, one in fixed.items() if one[1] <= budget}}
    times = {name: [] for name in steps}
    for turn in range(rounds):
        for name, (step, _) in steps.items():
            began = time.perf_counter()
            for _ in range(3):
                state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            if turn:
                times[name].append((time.perf_counter() - began) / 3)
    rows.append({"budget": budget, "allocated": steps["auto"][1], "plan": made.decided,
                 "seconds": {name: statistics.median(taken) for name, taken in times.items()}})
print(json.dumps(rows))
"""


def test_no_fixed_policy_that_fits_is_faster():
    done = run_code(CHILD, "gpt2_small", json.dumps(SHARES), "9", timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    for row in rows:
        times = "  ".join(f"{name} {1e3 * taken:.2f}" for name, taken in row["seconds"].items())
        print(f"\n{row['allocated'] / 2**30:.2f} of {row['budget'] / 2**30:.2f} GiB, ms: {times}\n  {row['plan']}")
    for row in rows:
        auto, others = row["seconds"].pop("auto"), row["seconds"]
        assert row["allocated"] <= row["budget"]
        assert not others or auto <= min(others.values()) * (1 + NOISE), row
