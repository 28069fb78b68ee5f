"""Tree search by mctx: a MuZero policy of a small learned model, one program without any gradient."""

import jax
import jax.numpy as jnp
import mctx

spec = jax.ShapeDtypeStruct
BATCH, WIDTH, ACTIONS, SIMULATIONS = 256, 512, 18, 64


def muzero():
    """64 simulations for 256 roots; the tree's embeddings are what the memory is spent on."""

    def recurrent_fn(params, rng_key, action, embedding):
        hidden = jax.nn.relu(embedding @ params["dynamics"] + params["action"][action])
        output = mctx.RecurrentFnOutput(
            reward=hidden @ params["reward"],
            discount=jnp.full(action.shape, 0.99),
            prior_logits=hidden @ params["policy"],
            value=hidden @ params["value"],
        )
        return output, hidden

    @jax.jit
    def search(params, rng_key, observation):
        embedding = jax.nn.relu(observation @ params["representation"])
        root = mctx.RootFnOutput(
            prior_logits=embedding @ params["policy"], value=embedding @ params["value"], embedding=embedding
        )
        policy = mctx.muzero_policy(params, rng_key, root, recurrent_fn, num_simulations=SIMULATIONS)
        return policy.action, policy.action_weights

    shapes = {
        "representation": (128, WIDTH),
        "dynamics": (WIDTH, WIDTH),
        "action": (ACTIONS, WIDTH),
        "reward": (WIDTH,),
        "policy": (WIDTH, ACTIONS),
        "value": (WIDTH,),
    }
    params = {name: spec(shape, jnp.float32) for name, shape in shapes.items()}
    return search, (params, jax.eval_shape(lambda: jax.random.PRNGKey(0)), spec((BATCH, 128), jnp.float32))
