"""Products of activations with weights: their gradients, and the order in which a CPU computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.model.layers import product

UP, DOWN = "bld,df->blf", "blf,fd->bld"


@pytest.mark.parametrize("spec, x, w", [(UP, (2, 3, 4), (4, 5)), ("blhk,hkd->bld", (2, 3, 5, 4), (5, 4, 6))])
def test_a_product_has_the_gradients_of_einsum(spec, x, w):
    def gradients(multiply):
        def loss(x, w):
            return jnp.sum(jnp.sin(multiply(spec, x, w)))

        return jax.grad(loss, (0, 1))(jax.random.normal(jax.random.key(0), x), jax.random.normal(jax.random.key(1), w))

    for ours, expected in zip(gradients(product), gradients(jnp.einsum)):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_cpu_computes_no_wide_gradient_in_transposed_order():
    def compiled(multiply):
        def layer(x_BLD, weights):
            gate, up, down = weights
            return x_BLD + multiply(DOWN, jax.nn.silu(multiply(UP, x_BLD, gate)) * multiply(UP, x_BLD, up), down), None

        def loss(weights, x_BLD):
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x_BLD, weights)[0] ** 2)

        def array(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        weights = array(2, 64, 192), array(2, 64, 192), array(2, 192, 64)
        return jax.jit(jax.grad(loss)).lower(weights, array(4, 128, 64)).compile().as_text()

    transposed = "= f32[192,512]"  # [F, B x L]
    assert transposed not in compiled(product)
    assert transposed in compiled(jnp.einsum)  # otherwise XLA needs no help any more
