"""The training step of big_vision's `train.py`, compiled for GPUs that are not there.

    export PYTHONPATH=big_vision                # a checkout of google-research/big_vision; it has no package
    bytescope report big_vision_vit.py:program h100:8
    bytescope compare big_vision_vit.py:program h100:8 --grid=remat=none,nothing_saveable,dots_saveable

Config, model, optimizer and shardings are big_vision's own. `update_fn` is a copy of the function of this name inside
`big_vision.train.main`, without mixup and without the norms that the function logs. Needs einops.
"""

import importlib
import sys
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# big_vision opens files with TensorFlow. The step opens none.
importlib.import_module("flax.training.checkpoints")  # looks for the real TensorFlow
_UNUSED = [name for name in ("tensorflow", "tensorflow.io", "tensorflow.io.gfile") if name not in sys.modules]
sys.modules.update((name, mock.MagicMock()) for name in _UNUSED)
import big_vision.optax as bv_optax
import big_vision.sharding as bv_sharding
import big_vision.utils as u

for _name in _UNUSED:
    del sys.modules[_name]

IMAGES = 1_281_167  # ImageNet's training images, which only the learning rate depends on


def program(config="vit_s16_i1k", variant="", batch=0, size=224, remat="none", fsdp=False, dtype="float32"):
    """Returns the jitted step with its arguments, (train_state, rng, batch).

    Args:
        config: name of a classification config in big_vision/configs.
        variant: ViT variant, such as B/16 or g/14 (default: the config's).
        batch: images per step, over all devices (default: the config's).
        size: height and width of the images.
        remat: none, or a policy of `jax.checkpoint_policies`, with which big_vision scans its blocks.
        fsdp: shards the state over all devices, as `sharding_strategy=[(".*", "fsdp(axis='data')")]` does.
        dtype: compute dtype of matrix products, `model.dtype_mm`.
    """
    config = importlib.import_module(f"big_vision.configs.{config}").get_config()
    model_args = {**config.get("model", {}), "dtype_mm": dtype}
    if variant:
        model_args["variant"] = variant
    if remat != "none":
        if not hasattr(jax.checkpoint_policies, remat):
            raise ValueError(f"remat={remat}: give none or a name of jax.checkpoint_policies")
        model_args |= {"scan": True, "remat_policy": remat}
    batch = batch or config.input.batch_size
    model = importlib.import_module(f"big_vision.models.{config.model_name}").Model(config.num_classes, **model_args)
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch, config.num_classes), jnp.float32)
    rng = jax.eval_shape(lambda: jax.random.PRNGKey(0))

    mesh = u.create_device_mesh([("data", -1)])
    params = jax.eval_shape(model.init, rng, images)["params"]
    total_steps = u.steps("total", config, IMAGES, batch)
    schedule = {"total_steps": total_steps, "batch_size": batch, "data_size": IMAGES}
    tx, _ = bv_optax.make(config, nn.unbox(params), sched_kw=schedule)
    state = {"params": params, "opt": jax.eval_shape(tx.init, params)}
    strategy = [(".*", "fsdp(axis='data')" if fsdp else "replicate")]
    sharding = bv_sharding.infer_sharding(state, strategy=strategy, mesh=mesh)
    state = nn.unbox(state)

    def update_fn(train_state, rng, batch):
        rng = jax.random.fold_in(rng, bv_optax.get_count(train_state["opt"], jittable=True))
        _, rng_model = jax.random.split(rng, 2)

        def loss_fn(params):
            logits, _ = model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": rng_model})
            return getattr(u, config.get("loss", "sigmoid_xent"))(logits=logits, labels=batch["labels"])

        loss, grads = jax.value_and_grad(loss_fn)(train_state["params"])
        updates, opt = tx.update(grads, train_state["opt"], train_state["params"])
        return {"params": optax.apply_updates(train_state["params"], updates), "opt": opt}, {"training_loss": loss}

    everywhere, data = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step = jax.jit(
        update_fn,
        donate_argnums=0,
        in_shardings=(sharding, everywhere, data),
        out_shardings=(sharding, everywhere),
    )
    return step, (state, rng, {"image": images, "labels": labels})


program.how = ("remat", "fsdp")  # type: ignore[attr-defined]  # read by bytescope compare
