"""A dropout mask under jax.checkpoint that is drawn again with other bits, so that the gradient is wrong (jax#21046).

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python tests/bench/redrawn_mask.py

The script needs jax alone, of any version since 0.4.26. The backward pass divides the mask by columns, and the forward
pass by rows. With jax_threefry_partitionable=False the bits depended on the division until jax 0.4.38. Measured in
November 2026 on 8 simulated CPU devices, as the relative difference of the gradient with and without jax.checkpoint:

    jax 0.4.26, 0.4.38           as written 6.6e-01    mask constrained 0.0e+00
    jax 0.5.3, 0.10.2, 0.12.0    as written 0.0e+00    mask constrained 0.0e+00

Keys of the implementations rbg and unsafe_rbg give the same bits with each of these versions on the CPU. For TPUs,
`tpu_step` is the program of the same defect: see tests/memory/audit/test_randomness.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH = 64


def make_step(remat, constrained, mesh):
    """Returns a step (weights, batch, key) -> (loss, gradient of the weights). Both arrays are WIDTH x WIDTH.

    remat: whether the dropout is under jax.checkpoint. constrained: whether the mask has a sharding constraint, which
    is the remedy. mesh: a mesh with the axes x and y.
    """

    def constrain(array, *axes):
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*axes)))

    @jax.custom_vjp
    def by_columns_in_backward(y):
        return y

    by_columns_in_backward.defvjp(
        lambda y: (constrain(y, "x", None), None), lambda _, cotangent: (constrain(cotangent, None, ("x", "y")),)
    )

    def loss(weights, batch, key):
        def dropout(h):
            mask = jax.random.bernoulli(key, 0.5, h.shape)
            if constrained:
                mask = constrain(mask, None, None)
            return jnp.where(mask, h, 0) * 2

        if remat:
            dropout = jax.checkpoint(dropout)
        return (jnp.tanh(by_columns_in_backward(dropout(jnp.tanh(batch @ weights)))) ** 2).sum()

    return jax.jit(jax.value_and_grad(loss))


def compare(constrained):
    """Returns the relative differences of the loss and of the gradient with and without jax.checkpoint."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    random = np.random.default_rng(0)
    weights, batch = (random.normal(size=(WIDTH, WIDTH)).astype("float32") / 8 for _ in range(2))
    key = jax.random.PRNGKey(0)
    (loss, gradient), (plain_loss, plain) = (
        make_step(remat, constrained, mesh)(weights, batch, key) for remat in (True, False)
    )
    return abs(float(loss / plain_loss - 1)), float(np.linalg.norm(gradient - plain) / np.linalg.norm(plain))


def tpu_step(weights, head, batch, seed):
    """A loss with its gradients. If all arguments are sharded over all devices by rows, XLA for TPUs with the flag
    xla_tpu_spmd_rng_bit_generator_unsafe divides the mask by rows in the forward pass and by columns in the
    recomputation."""

    def dropout(h):
        mask = jax.random.bernoulli(jax.random.wrap_key_data(seed, impl="rbg"), 0.5, h.shape)
        return jnp.where(mask, h, 0) * 2

    def loss(weights, head, batch):
        y = jax.checkpoint(dropout)(jnp.tanh(batch @ weights))
        return (jnp.tanh(y @ head) ** 2).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(weights, head, batch)


def main():
    jax.config.update("jax_threefry_partitionable", False)
    for constrained in (False, True):
        words = "mask constrained" if constrained else "as written"
        print("jax {}: {}: loss {:.1e}, gradient {:.1e}".format(jax.__version__, words, *compare(constrained)))


if __name__ == "__main__":
    main()
