"""The trainer's own step compiled for GPUs that are not here: kernels, sharding and sizes as they will be."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from bytescope import memory
from bytescope.memory.devices import targets
from bytescope.train.program.config_files import load, override
from bytescope.train.program.program import build
from support.described import SMALL_GPU
from support.exhaustive import exhaustive
from support.toy import small_config

pytestmark = pytest.mark.oracle("cuda")


def compiled(overrides, target="h200"):
    program = build(small_config({**SMALL_GPU, **overrides}), targets.parse(target).devices())
    return program, program.compile()


def test_auto_takes_cudnn_on_a_described_gpu_and_saves_the_scores():
    program, fast = compiled({})
    assert program.kernel[0] == "cudnn" and "cudnn" in fast.as_text()
    _, plain = compiled({"model.attention": "naive"})
    scores = 2 * 2048 * 2048 * 4
    assert plain.memory_analysis().temp_size_in_bytes - fast.memory_analysis().temp_size_in_bytes > scores


@pytest.mark.exhaustive
@pytest.mark.usefixtures("assembler")
def test_a_shipped_mesh_fits_where_it_should():
    target = "h100:64x8"
    program = build(load("llama_405b"), targets.parse(target).devices())
    report = memory.analyze(program.lower(), target=target)
    assert report.fits and report.allocated_bytes < 66 * 2**30
    assert sum(report.breakdown.values()) == report.allocated_bytes
    elements = sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in jax.tree.leaves(program.state.params)
    )
    assert report.breakdown["params"] == 4 * elements and report.breakdown["optimizer"] >= 8 * elements


def test_xla_remat_pass_is_off_unless_a_key_turns_it_on():
    config = small_config(SMALL_GPU)
    seen = []

    class Recorder:
        def compile(self, compiler_options):
            seen.append(jax.config.jax_compiler_enable_remat_pass)

    for enabled in (False, True):
        override(config, "remat.xla_pass", str(enabled))
        program = build(config, targets.parse("h200").devices())
        object.__setattr__(program, "lower", Recorder)
        program.compile()
    assert seen == [False, True]


@pytest.mark.parametrize(
    "before", ["", *exhaustive("jnp.ones(3).block_until_ready()")], ids=["first", "after an array"]
)
def test_a_script_that_says_nothing_of_platforms_compiles_for_gpus(before):
    script = f"""
import jax, jax.numpy as jnp
from bytescope import memory
{before}
report = memory.analyze(lambda x: x @ x, jax.ShapeDtypeStruct((256, 256), jnp.float32), target="h200")
print(report.target["name"], report.peak_bytes > 0, jax.devices()[0].platform)
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "CUDA_"))}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**environment, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.stdout == "h200 True cpu\n", done.stderr
    assert before or not done.stderr, "jax looked for a driver"
