"""Gradients of weights among the gradients of activations of the same shape."""

import jax
import jax.numpy as jnp

from bytescope import memory

N = 32
spec = jax.ShapeDtypeStruct


def test_an_activation_shaped_like_a_weight_has_no_gradient_of_a_parameter():
    """The batch is as large as a layer is wide; what becomes the gradient of a bias or of a weight is none itself."""

    def loss(params, x):
        for layer in params:
            x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
        return (x**2).sum()

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    params = [{"w": spec((N, N), jnp.float32), "b": spec((N,), jnp.float32)} for _ in range(3)]
    report = memory.analyze(step, params, spec((N, N), jnp.float32), donate_argnums=0)
    backward = [b for b in report.buffers if b.phase == "backward" and b.shape == (N, N)]
    assert any(b.category == "workspace" for b in backward)
    assert all(b.parameter for b in backward if b.category == "gradients")
