"""Programs over several devices by the ways there are: pmap, shard_map, sharding of arguments."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

spec = jax.ShapeDtypeStruct
f32, bf16 = jnp.float32, jnp.bfloat16


def _mlp(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]


def pmap():
    """Data parallel by pmap: replicated state with a leading axis of devices, gradients averaged by pmean."""
    devices, tx = jax.local_device_count(), optax.sgd(0.1, momentum=0.9)

    @functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        def loss_fn(params):
            logits = _mlp(params, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = jax.lax.pmean(grads, axis_name="batch")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "batch")

    sizes = (3072, 4096, 4096, 1000)
    params = [{"kernel": spec((m, n), f32), "bias": spec((n,), f32)} for m, n in itertools.pairwise(sizes)]
    opt_state = jax.eval_shape(tx.init, params)
    batch = {"image": spec((256, 3072), f32), "label": spec((256,), jnp.int32)}
    stacked = jax.tree.map(lambda x: spec((devices, *x.shape), x.dtype), (params, opt_state, batch))
    return train_step, stacked


def tensor_parallel():
    """A gated MLP by shard_map: columns, then rows, one psum; forward and backward."""
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(AxisType.Auto,))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(None, None), P(None, "model"), P(None, "model"), P("model", None)),
        out_specs=P(None, None),
    )
    def mlp(x, w_gate, w_up, w_down):
        return jax.lax.psum((jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down, "model")

    @jax.jit
    def step(weights, x, y):
        def loss(weights):
            return jnp.mean((mlp(x, *weights).astype(f32) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    def on(shape, dtype, *axes):
        return spec(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    weights = (
        on((4096, 14336), bf16, None, "model"),
        on((4096, 14336), bf16, None, "model"),
        on((14336, 4096), bf16, "model", None),
    )
    return step, (weights, on((8192, 4096), bf16), on((8192, 4096), f32))


def ring():
    """All-gather matrix product in a ring of ppermutes under shard_map, as the collective-matmul tutorial has it."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("i",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("i", None), P("i", None)), out_specs=P("i", None))
    def matmul(lhs, rhs):
        size = rhs.shape[0]

        def body(step, carry):
            total, block = carry
            at = ((jax.lax.axis_index("i") - step) % devices) * size
            total = total + jax.lax.dynamic_slice_in_dim(lhs, at, size, axis=1) @ block
            return total, jax.lax.ppermute(block, "i", [(n, (n + 1) % devices) for n in range(devices)])

        start = jax.lax.pcast(jnp.zeros((lhs.shape[0], rhs.shape[1]), lhs.dtype), "i", to="varying")
        return jax.lax.fori_loop(0, devices, body, (start, rhs))[0]

    sharded = NamedSharding(mesh, P("i", None))
    return jax.jit(matmul), (spec((16384, 8192), bf16, sharding=sharded), spec((8192, 8192), bf16, sharding=sharded))


def data_parallel():
    """A batch sharded over a mesh and replicated parameters; the compiler adds the all-reduces. Adam is not donated."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    tx = optax.adam(1e-3)

    @jax.jit
    def train_step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((_mlp(p, x) - y) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    sizes = (1024, 8192, 8192, 1024)
    params = [{"kernel": spec((m, n), f32), "bias": spec((n,), f32)} for m, n in itertools.pairwise(sizes)]
    replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params, opt_state = jax.tree.map(
        lambda x: spec(x.shape, x.dtype, sharding=replicated), (params, jax.eval_shape(tx.init, params))
    )
    return train_step, (
        params,
        opt_state,
        spec((8192, 1024), f32, sharding=sharded),
        spec((8192, 1024), f32, sharding=sharded),
    )


def tensor_parallel_decode():
    """One token of attention whose heads are sharded: the token is replicated on every device, and should be."""
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(AxisType.Auto,))

    def decode(weights, x, k_cache, v_cache, at):
        q, k, v = (jnp.einsum("bd,dhk->bhk", x, weights[name]) for name in "qkv")
        k_cache = jax.lax.dynamic_update_slice_in_dim(k_cache, k[:, None], at, axis=1)
        v_cache = jax.lax.dynamic_update_slice_in_dim(v_cache, v[:, None], at, axis=1)
        scores = jnp.einsum("bhk,bthk->bht", q, k_cache).astype(f32)
        probs = jax.nn.softmax(jnp.where(jnp.arange(scores.shape[-1]) <= at, scores, -1e30)).astype(bf16)
        return jnp.einsum("bht,bthk,hkd->bd", probs, v_cache, weights["o"]), k_cache, v_cache

    def on(shape, *axes):
        return spec(shape, bf16, sharding=NamedSharding(mesh, P(*axes)))

    weights = {
        **{name: on((4096, 32, 128), None, "model", None) for name in "qkv"},
        "o": on((32, 128, 4096), "model", None, None),
    }
    cache = on((64, 4096, 32, 128), None, None, "model", None)
    at = spec((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return jax.jit(decode, donate_argnums=(2, 3)), (weights, on((64, 4096)), cache, cache, at)
