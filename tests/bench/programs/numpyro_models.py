"""Inference in NumPyro: a step of stochastic variational inference, and one of the no-U-turn sampler."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

spec = jax.ShapeDtypeStruct
ROWS, FEATURES = 65536, 256


def logistic(x, y=None):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(FEATURES), 1.0).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", ROWS):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


def svi():
    """SVI.update of a logistic regression: the state is an optimizer's own triple with a random key."""
    guide = AutoNormal(logistic)
    inference = SVI(logistic, guide, numpyro.optim.Adam(1e-3), Trace_ELBO(num_particles=8))
    x, y = spec((ROWS, FEATURES), jnp.float32), spec((ROWS,), jnp.float32)
    state = jax.eval_shape(lambda x, y: inference.init(jax.random.PRNGKey(0), x, y), x, y)
    return jax.jit(inference.update), (state, x, y)


def nuts():
    """One transition of NUTS with its adaptation: whiles in a while, and hardly any bytes beside the data."""
    import numpy as np

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, FEATURES)).astype(np.float32), (rng.random(ROWS) < 0.5).astype(np.float32)
    kernel = NUTS(logistic)
    state = kernel.init(jax.random.PRNGKey(0), 100, None, model_args=(x, y), model_kwargs={})

    def step(state, x, y):
        return kernel.sample(state, (x, y), {})

    return jax.jit(step), (state, x, y)


def chains():
    """A whole MCMC run of four vectorized chains as one program would be: warm-up and samples under one jit."""

    def run(key, x, y):
        mcmc = MCMC(
            NUTS(logistic), num_warmup=50, num_samples=50, num_chains=4, chain_method="vectorized", progress_bar=False
        )
        mcmc.run(key, x, y)
        return mcmc.get_samples()

    x, y = spec((ROWS, FEATURES), jnp.float32), spec((ROWS,), jnp.float32)
    return jax.jit(run), (jax.eval_shape(lambda: jax.random.PRNGKey(0)), x, y)
