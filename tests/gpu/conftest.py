"""Tests of this folder run on the GPU: what the other tests set for the CPU is taken back before jax starts."""

import os
import sys
from pathlib import Path

import jax

from bytescope.memory.devices import platform

sys.path.insert(0, str(Path(__file__).parent))
import rows

if platform.accelerator() == "cuda":
    for name in rows.PINNED:
        os.environ.pop(name, None)
    os.environ["XLA_FLAGS"] = rows.environment()["XLA_FLAGS"]
    jax.config.update("jax_platforms", "cuda")
