"""Devices that are not here, for tests."""

from typing import Any

import jax

from bytescope.memory.devices import targets
from bytescope.memory.devices.compiler import Compilation
from bytescope.train.program.config_files import load, override
from bytescope.train.program.program import build
from support.oracles import require

# A config that fills the tiles of a GPU's kernels and still compiles in a second.
SMALL_GPU = {
    "precision.preset": "bf16",
    "model.d_model": 128,
    "model.d_head": 64,
    "model.n_heads": 2,
    "model.n_kv_heads": 1,
    "model.max_seq_len": 2048,
    "data.seq_len": 2048,
    "batch.micro": 1,
}
# One whose residuals are large beside everything else, with the plain attention kernel.
LAYERS = 4
WIDE_GPU = {
    "model.d_model": 512,
    "model.n_heads": 8,
    "model.n_kv_heads": 8,
    "model.d_head": 64,
    "model.d_ff": 1536,
    "model.vocab_size": 512,
    "model.max_seq_len": 1024,
    "data.seq_len": 1024,
    "batch.micro": 4,
    "precision.preset": "bf16",
    "model.n_layers": LAYERS,
    "model.attention": "naive",
}


def described(name: str) -> list[jax.Device]:
    """The devices of a GPU target such as `h100:8`."""
    require("cuda")
    return targets.parse(name).devices()


def compile_described(target: str, overrides: dict[str, Any], base: str = "tiny") -> Compilation:
    """The report's compilation of a program for a described GPU."""
    devices = described(target)
    config = load(base)
    for key, value in overrides.items():
        override(config, key, str(value))
    return build(config, devices).compile_for_report()
