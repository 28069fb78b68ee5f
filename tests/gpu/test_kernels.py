"""On a card: cuDNN attention equals the plain kernel, packed rows too, and a deterministic run repeats bit for bit.

python -m pytest tests/gpu/test_kernels.py
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.configs import base
from bytescope.memory.devices import platform
from bytescope.model import ModelConfig
from bytescope.model.attention.attention_kernels import KERNELS
from bytescope.model.placement import ONE_DEVICE

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(platform.accelerator() != "cuda", reason="no NVIDIA card in this machine")


@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 8, 64), (8, 2, 128)])
def test_cudnn_equals_naive_in_values_and_gradients(heads, groups, width):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 512, heads, width), (2, 512, groups, width), (2, 512, groups, width), (2, 512, heads, width)]
    q, k, v, weight = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))
    config = ModelConfig.from_dict({**base.get_config().model.to_dict(), "d_head": width})

    def run(kernel):
        attend = partial(KERNELS[kernel].run, config=config, key_B=None, place=ONE_DEVICE)
        value, pull = jax.vjp(attend, q, k, v)
        return value, *pull(weight)

    for one, other in zip(jax.jit(run, static_argnums=0)("cudnn"), jax.jit(run, static_argnums=0)("naive")):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.abs(one - other).max() <= 0.03 * np.abs(other).max()


@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 8, 64), (8, 2, 128)])
def test_cudnn_computes_packed_examples_as_if_each_were_alone(heads, groups, width):
    lengths, length = (200, 1, 215), 512  # 96 of padding
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [
        (2, length, heads, width),
        (2, length, groups, width),
        (2, length, groups, width),
        (2, length, heads, width),
    ]
    ends = np.cumsum(lengths)
    q, k, v, weight = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))
    weight = weight.at[:, ends[-1] :].set(0)
    segments = np.repeat(np.r_[1 : len(lengths) + 1, 0], [*lengths, length - ends[-1]]).astype(np.int32)
    config = ModelConfig.from_dict({**base.get_config().model.to_dict(), "d_head": width})

    def run(kernel, segments_BL, q, k, v, weight):
        value, pull = jax.vjp(
            lambda q, k, v: KERNELS[kernel].run(q, k, v, segments_BL, config=config, key_B=None, place=ONE_DEVICE),
            q,
            k,
            v,
        )
        return value, *pull(weight)

    packed = jax.jit(run, static_argnums=0)("cudnn", jnp.tile(segments, (2, 1)), q, k, v, weight)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in packed)
    for gradient in packed[1:]:
        assert not np.any(np.asarray(gradient[:, ends[-1] :], np.float32))
    for start, end in zip((0, *ends[:-1]), ends):
        alone = run("naive", None, *(x[:, start:end].astype(jnp.float32) for x in (q, k, v, weight)))
        for one, other in zip(packed, alone):
            one = np.asarray(one[:, start:end], np.float32)
            assert np.abs(one - other).max() <= 0.03 * np.abs(other).max() + 1e-3


def test_a_deterministic_run_repeats_bit_for_bit(tmp_path):
    curves = []
    for name in ("first", "second"):
        subprocess.run(
            [
                sys.executable,
                "-m",
                "bytescope.memory",
                "train",
                "tiny",
                f"--workdir={tmp_path / name}",
                "--config.precision.preset=bf16",
                "--config.train.steps=30",
                "--config.train.log_every=1",
                "--config.train.eval_sequences=64",
                "--config.train.sample_tokens=0",
                "--config.train.deterministic=True",
            ],
            check=True,
            cwd=ROOT,
            timeout=600,
        )
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        curves.append([(row["step"], row.get("loss"), row.get("eval_loss")) for row in rows])
    assert curves[0] == curves[1]
