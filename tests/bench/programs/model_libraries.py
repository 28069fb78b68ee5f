"""Models of libraries that train and serve them, as they ship them: tunix's Qwen3 (NNX), equimo's ViT (Equinox)."""

import dataclasses
import importlib.util
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

spec = jax.ShapeDtypeStruct
BATCH, LENGTH, LAYERS = 8, 1024, 6


def _qwen3():
    """tunix's module of the model, without the trainers and loggers that its package imports."""
    if "tunix" not in sys.modules:
        found = importlib.util.find_spec("tunix")
        if found is None:
            raise ModuleNotFoundError("tunix", name="tunix")
        sys.modules["tunix"] = package = types.ModuleType("tunix")
        package.__path__ = list(found.submodule_search_locations)
    from tunix.models.qwen3 import model

    return model


def _sharded(state, mesh):
    """Leaves with the shardings that tunix writes into its variables."""
    specs = nnx.get_partition_spec(state)
    return jax.tree.map(
        lambda leaf, axes: spec(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, axes)),
        nnx.pure(state),
        nnx.pure(specs),
    )


def _abstract_qwen3(mesh, **changes):
    module = _qwen3()
    config = dataclasses.replace(module.ModelConfig.qwen3_0p6b(), num_layers=LAYERS, dtype=jnp.bfloat16, **changes)
    with jax.set_mesh(mesh):
        return nnx.split(nnx.eval_shape(lambda: module.Qwen3(config, rngs=nnx.Rngs(0))))


def qwen3_train():
    """Six layers of Qwen3 0.6B, fully sharded by tunix's own table, with AdamW; donated.

    tunix leaves its constraints of activations out where it is traced on a CPU, and XLA then gathers what it likes.
    """
    mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    graph, state = _abstract_qwen3(mesh, remat_config=_qwen3().RematConfig.BLOCK)
    tx, params = optax.adamw(1e-5), _sharded(state, mesh)
    moments = jax.eval_shape(tx.init, params)
    shardings = {(leaf.shape, str(leaf.dtype)): leaf.sharding for leaf in jax.tree.leaves(params)}
    opt_state = jax.tree.map(
        lambda leaf: spec(
            leaf.shape, leaf.dtype, sharding=shardings.get((leaf.shape, str(leaf.dtype)), NamedSharding(mesh, P()))
        ),
        moments,
    )

    def train_step(params, opt_state, batch):
        def loss_fn(params):
            model = nnx.merge(graph, params)
            tokens = batch["input_tokens"]
            positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
            causal = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))
            logits, _ = model(tokens, positions, None, causal)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
            return jnp.sum(losses * batch["input_mask"][:, 1:]) / jnp.sum(batch["input_mask"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    sharded = NamedSharding(mesh, P("fsdp"))
    batch = {name: spec((BATCH, LENGTH), jnp.int32, sharding=sharded) for name in ("input_tokens", "input_mask")}
    return jax.jit(train_step, donate_argnums=(0, 1)), (params, opt_state, batch)


def qwen3_decode():
    """One token of the same model with its cache, which is a dictionary by layers; the cache is donated."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    graph, state = _abstract_qwen3(mesh, param_dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        cache = jax.eval_shape(
            lambda: nnx.merge(
                graph, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nnx.pure(state))
            ).init_cache(64, 2048, jnp.bfloat16)
        )
    cache = jax.tree.map(lambda leaf: spec(leaf.shape, leaf.dtype), cache)

    def step(params, cache, tokens, positions, attention_mask):
        logits, cache = nnx.merge(graph, params)(tokens, positions, cache, attention_mask)
        return jnp.argmax(logits[:, -1], axis=-1), cache

    one = spec((64, 1), jnp.int32)
    params = jax.tree.map(lambda leaf: spec(leaf.shape, leaf.dtype), nnx.pure(state))
    return step, (params, cache, one, one, spec((64, 1, 2048), jnp.bool_)), {"donate_argnums": 1}


def vit():
    """equimo's ViT-S/16 with dropout keys over a vmapped batch, AdamW; nothing is donated."""
    from equimo.models import vit

    optim = optax.adamw(1e-3)

    @eqx.filter_jit
    def make_step(model, opt_state, images, labels, key):
        @eqx.filter_value_and_grad
        def loss(model):
            keys = jax.random.split(key, images.shape[0])
            logits = jax.vmap(lambda image, key: model(image, key))(images, keys)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = loss(model)
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, value

    def create(key):
        model = vit.vit_small_patch16_224(num_classes=1000, key=key)
        return model, optim.init(eqx.filter(model, eqx.is_inexact_array))

    key = jax.random.PRNGKey(0)
    model, opt_state = eqx.filter_eval_shape(create, key)
    return make_step, (
        model,
        opt_state,
        spec((64, 3, 224, 224), jnp.float32),
        spec((64,), jnp.int32),
        spec(key.shape, key.dtype),
    )
