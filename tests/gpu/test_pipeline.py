"""On several cards: a pipelined step has the losses of one card, for every schedule, whatever its stages wait for.

    python -m pytest tests/gpu/test_pipeline.py

Stages run loops of different lengths in the same tick, with collectives of fsdp inside them: XLA reads a length that is
not known beforehand on the host, and NCCL has to pair what each group sends. A schedule that hangs here is the finding.
"""

import jax
import numpy as np
import pytest

from bytescope.memory.devices import platform
from support.toy import run_losses, small_program

COUNT = jax.device_count() if platform.accelerator() == "cuda" else 0
pytestmark = pytest.mark.skipif(COUNT < 2, reason="fewer than two NVIDIA cards in this machine")
DEEP = {"model.n_layers": 8, "batch.mode": "scan", "batch.accumulation": 8}


@pytest.fixture(scope="module")
def plain():
    return run_losses(small_program({**DEEP, "batch.micro": 4}), steps=5)


@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("v", 2)])
def test_losses_are_those_of_one_card(schedule, virtual, fsdp, plain):
    stages = next((size for size in (4, 2) if size * fsdp <= COUNT), 0)
    if not stages:
        pytest.skip(f"{COUNT} cards are fewer than 2 stages x {fsdp}")
    program = small_program(
        {
            **DEEP,
            "mesh.stage": stages,
            "mesh.fsdp": fsdp,
            "batch.micro": 4 // fsdp,
            "pipeline.schedule": schedule,
            "pipeline.virtual": virtual,
        },
        stages * fsdp,
    )
    np.testing.assert_allclose(run_losses(program, steps=5), plain, rtol=1e-3)
