"""Kernels by pallas between ordinary operations: by Triton, by what pallas takes itself, interpreted on the CPU."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

spec = jax.ShapeDtypeStruct


def _softmax_kernel(x_ref, o_ref):
    x = x_ref[...].astype(jnp.float32)
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    o_ref[...] = (e / jnp.sum(e, axis=-1, keepdims=True)).astype(o_ref.dtype)


def _softmax(x, interpret):
    rows, columns = x.shape
    block = pl.BlockSpec((8, columns), lambda i: (i, 0))
    return pl.pallas_call(
        _softmax_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows // 8,),
        in_specs=[block],
        out_specs=block,
        compiler_params=triton.CompilerParams(),
        interpret=interpret,
    )(x)


def softmax():
    """A fused softmax between two products."""

    def step(x, w, v):
        scores = x @ w
        probs = jax.lax.platform_dependent(
            scores,
            cpu=functools.partial(_softmax, interpret=True),
            default=functools.partial(_softmax, interpret=False),
        )
        return probs @ v

    return jax.jit(step), (
        spec((8192, 1024), jnp.bfloat16),
        spec((1024, 2048), jnp.bfloat16),
        spec((2048, 1024), jnp.bfloat16),
    )


def _gate_kernel(gate_ref, up_ref, o_ref):
    gate = gate_ref[...].astype(jnp.float32)
    o_ref[...] = (gate / (1 + jnp.exp(-gate)) * up_ref[...].astype(jnp.float32)).astype(o_ref.dtype)


def _gate(gate, up, interpret):
    block = pl.BlockSpec((64, 128), lambda i, j: (i, j))
    return pl.pallas_call(
        _gate_kernel,
        out_shape=jax.ShapeDtypeStruct(gate.shape, gate.dtype),
        grid=(gate.shape[0] // 64, gate.shape[1] // 128),
        in_specs=[block, block],
        out_specs=block,
        interpret=interpret,
    )(gate, up)


@jax.custom_vjp
def _gated(gate, up):
    return jax.lax.platform_dependent(
        gate, up, cpu=functools.partial(_gate, interpret=True), default=functools.partial(_gate, interpret=False)
    )


def _gated_backward(residuals, g):
    _, pull = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, *residuals)
    return pull(g)


_gated.defvjp(lambda gate, up: (_gated(gate, up), (gate, up)), _gated_backward)


def gated():
    """A gated MLP's training step whose activation is a kernel, with a gradient by custom_vjp."""

    def step(params, x, y):
        def loss(params):
            hidden = _gated(x @ params["gate"], x @ params["up"])
            return jnp.mean((hidden @ params["down"] - y).astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    params = {
        "gate": spec((1024, 4096), jnp.bfloat16),
        "up": spec((1024, 4096), jnp.bfloat16),
        "down": spec((4096, 1024), jnp.bfloat16),
    }
    x = spec((4096, 1024), jnp.bfloat16)
    return step, (params, x, x), {"donate_argnums": 0}
