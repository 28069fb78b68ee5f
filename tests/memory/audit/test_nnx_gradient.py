"""flax#5116: a step with nnx.grad had 5.26 GB of temporary memory, the same step with jax.grad 2.76 GB.

The difference is one copy of the parameters. The thread has no cause, and the defect is gone: for an H100, 10 layers of
8192 x 8192 with Adam have 0.30 GB of temporary memory if the layers are unrolled and 3.26 GB if they are scanned, with
nnx.jit and nnx.grad, with jax.jit and nnx.grad, and with jax.grad alone (November 2026; flax 0.12.8 and 0.12.1 with jax
0.10.2; on the CPU also flax 0.12.1 with jax 0.8.1, the versions of the thread's date). If the model or the optimizer
is not donated, the finding not_donated names the copy.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from bytescope import memory

WIDTH, LAYERS, ROWS = 1024, 6, 64
PARAMETERS = 4 * LAYERS * WIDTH * WIDTH
OPTIMIZER = optax.adam(1e-3)


class Unrolled(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


class Scanned(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return nnx.relu(layer(x))

        return run(x, self.layers)


def mean_square(model, x):
    return jnp.mean(model(x) ** 2)


def reports(block, donate=(0, 1)):
    """The reports of the step with nnx.jit and nnx.grad, with nnx.grad, and with jax.grad, for an H100."""
    model = nnx.eval_shape(lambda: block(nnx.Rngs(0)))
    graph, params = nnx.split(model, nnx.Param)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)

    def step(gradient):
        def run(params, state, x):
            updates, state = OPTIMIZER.update(gradient(params, x), state, params)
            return optax.apply_updates(params, updates), state

        return memory.analyze(
            run, params, jax.eval_shape(OPTIMIZER.init, params), x, target="h100", donate_argnums=donate
        )

    def nnx_step(model, optimizer, x):
        optimizer.update(model, nnx.grad(mean_square)(model, x))

    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(block(nnx.Rngs(0)), OPTIMIZER, wrt=nnx.Param))
    return (
        memory.analyze(nnx.jit(nnx_step, donate_argnums=donate).trace(model, optimizer, x), target="h100"),
        step(lambda params, x: nnx.grad(mean_square)(nnx.merge(graph, params), x)),
        step(lambda params, x: jax.grad(lambda params: mean_square(nnx.merge(graph, params), x))(params)),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", [Unrolled, Scanned])
def test_nnx_grad_has_the_temporary_memory_of_jax_grad(block):
    temporary = [report.xla.temp_bytes for report in reports(block)]
    assert max(temporary) - min(temporary) < 0.05 * PARAMETERS


@pytest.mark.exhaustive
def test_a_copy_of_the_model_is_named():
    for report in reports(Unrolled, donate=(1,)):
        (finding,) = [finding for finding in report.findings if finding.kind == "not_donated"]
        assert PARAMETERS <= finding.bytes < 1.01 * PARAMETERS
