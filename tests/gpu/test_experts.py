"""On a card: the grouped kernels of experts equal the reference that multiplies every token by every expert.

python -m pytest tests/gpu/test_experts.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bytescope.configs import base
from bytescope.memory.devices import platform
from bytescope.model import ModelConfig, Precision
from bytescope.model.experts.expert_layer import Experts
from bytescope.model.placement import ONE_DEVICE

pytestmark = pytest.mark.skipif(platform.accelerator() != "cuda", reason="no NVIDIA card in this machine")


@pytest.mark.parametrize(("experts", "per_token", "width"), [(8, 2, 512), (64, 8, 256)])
def test_grouped_equals_dense_in_values_and_gradients(experts, per_token, width):
    x_BLD, d_BLD = (jax.random.normal(key, (2, 1024, 512), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))

    def run(kernel):
        config = base.get_config()
        config.model.update(
            d_model=512, d_expert=width, experts=experts, experts_per_token=per_token, moe_kernel=kernel
        )
        layer = Experts(
            ModelConfig.from_dict(config.model),
            Precision.from_config(config.precision),
            ONE_DEVICE,
            rngs=nnx.Rngs(params=jax.random.key(1)),
        )
        graph, state = nnx.split(layer)

        def forward(state, x_BLD):
            return nnx.merge(graph, state)(x_BLD)[0]

        def both(state, x_BLD):
            y_BLD, pullback = jax.vjp(forward, state, x_BLD)
            return y_BLD, pullback(d_BLD)

        return jax.tree.leaves(jax.jit(both)(state, x_BLD))

    for one, other in zip(run("grouped"), run("dense"), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.abs(one - other).max() <= 0.03 * np.abs(other).max()
