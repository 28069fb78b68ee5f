"""A training step of an MLP whose size and rematerialization are parameters: an example for `bytescope compare`.

bytescope compare tests/support/grid_program.py:program --grid=remat=none,full --grid=width=256,512 h100
"""

import jax
import jax.numpy as jnp

ROWS = 64


def program(width=256, layers=4, remat="none", adam=True):
    """Returns a step with its arguments, (step, (state, batch), options): layers of [width, width], one update."""
    if remat not in ("none", "full"):
        raise ValueError(f"remat={remat}: give none or full")

    def layer(x_BD, w_DD):
        return jax.nn.gelu(x_BD @ w_DD), None

    body = jax.checkpoint(layer) if remat == "full" else layer

    def loss(params, x_BD):
        return jnp.mean(jax.lax.scan(body, x_BD, params)[0] ** 2)

    def step(state, x_BD):
        gradients = jax.grad(loss)(state["params"], x_BD)
        if not adam:
            return {"params": state["params"] - 1e-3 * gradients}
        mean = 0.9 * state["mean"] + 0.1 * gradients
        square = 0.99 * state["square"] + 0.01 * gradients**2
        return {"params": state["params"] - 1e-3 * mean / jnp.sqrt(square + 1e-8), "mean": mean, "square": square}

    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    state = dict.fromkeys(("params", "mean", "square") if adam else ("params",), weights)
    batch = jax.ShapeDtypeStruct((ROWS, width), jnp.float32)
    return step, (state, batch), {"donate_argnums": 0, "tokens": ROWS}


program.how = ("remat",)
