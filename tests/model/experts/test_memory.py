"""What the experts of a layer take on a GPU, forward and backward, as the compiler assigned it."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bytescope.configs import base
from bytescope.model import ModelConfig, Precision
from bytescope.model.experts.expert_layer import Experts
from bytescope.model.placement import ONE_DEVICE
from support.described import described
from support.exhaustive import exhaustive

GIB = 2**30
# Layer -> its shape, its tokens, and the most that `grouped` may take, GiB. `lax.ragged_dot` takes 16.0 and 320.
LAYERS = {
    "Mixtral": ({"d_model": 4096, "d_expert": 14336, "experts": 8, "experts_per_token": 2}, 8192, 1.3),
    "256 experts": ({"d_model": 7168, "d_expert": 2048, "experts": 256, "experts_per_token": 8}, 4096, 3.5),
}


@pytest.mark.oracle("cuda")
@pytest.mark.usefixtures("assembler")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("layer", ["Mixtral", *exhaustive(*(name for name in LAYERS if name != "Mixtral"))])
def test_grouped_kernels_take_little_memory(layer):
    shape, tokens, most = LAYERS[layer]
    config = base.get_config()
    config.model.update(moe_kernel="grouped", **shape)
    model, precision = ModelConfig.from_dict(config.model), Precision.from_config(config.precision)
    device = described("h200:1")[0]
    place = jax.sharding.SingleDeviceSharding(device)
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(model, precision, ONE_DEVICE, rngs=nnx.Rngs(params=0))))
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16 if leaf.ndim == 3 else leaf.dtype, sharding=place),
        state,
    )
    x_BLD = jax.ShapeDtypeStruct((1, tokens, model.d_model), jnp.bfloat16, sharding=place)

    def both(state, x_BLD, d_BLD):
        def forward(state, x_BLD):
            y_BLD, load = nnx.merge(graph, state)(x_BLD)
            return y_BLD, load.balance

        (y_BLD, balance), pullback = jax.vjp(forward, state, x_BLD)
        return y_BLD, pullback((d_BLD, jnp.ones_like(balance)))

    kind = jax.sharding.Mesh([device], "x").abstract_mesh.abstract_device  # Pallas asks for it from jax 0.11 on
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind)):
        compiled = jax.jit(both).lower(state, x_BLD, x_BLD).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= most * GIB
