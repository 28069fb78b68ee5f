"""A graph network by jraph and Haiku-free parameters: segment sums over edges."""

import jax
import jax.numpy as jnp
import jraph
import optax
from flax import linen as nn

spec = jax.ShapeDtypeStruct
NODES, EDGES, WIDTH = 16384, 131072, 128


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, graph):
        def mlp(name):
            return lambda *parts: nn.Dense(WIDTH, name=f"{name}_out")(
                nn.relu(nn.Dense(WIDTH, name=f"{name}_in")(jnp.concatenate(parts, axis=-1)))
            )

        for step in range(3):
            edge, node = mlp(f"edge{step}"), mlp(f"node{step}")
            graph = jraph.GraphNetwork(
                update_edge_fn=lambda e, sent, received, g, edge=edge: edge(e, sent, received),
                update_node_fn=lambda n, sent, received, g, node=node: node(n, sent, received),
            )(graph)
        return nn.Dense(1)(graph.nodes)[:, 0]


def interaction():
    """Three rounds of message passing with a training step around them."""
    model, tx = GraphNet(), optax.adam(1e-3)

    @jax.jit
    def update(params, opt_state, graph, target):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, graph) - target) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    f32, i32 = jnp.float32, jnp.int32
    graph = jraph.GraphsTuple(
        nodes=spec((NODES, WIDTH), f32),
        edges=spec((EDGES, WIDTH), f32),
        senders=spec((EDGES,), i32),
        receivers=spec((EDGES,), i32),
        globals=None,
        n_node=spec((1,), i32),
        n_edge=spec((1,), i32),
    )
    params = jax.eval_shape(model.init, jax.random.key(0), graph)
    return update, (params, jax.eval_shape(tx.init, params), graph, spec((NODES,), f32))
