"""The training step of Flax's example lm1b (Linen), compiled for GPUs that are not there.

    export PYTHONPATH=flax/examples/lm1b        # of a checkout of google/flax; the example is not in the package
    bytescope report flax_lm1b.py:program h100:8
    bytescope compare flax_lm1b.py:program h100:8 --grid=batch=32,128 --grid=data=1,8 --grid=fsdp=1,8

The step, the optimizer, the initial state and the shardings are the example's own functions.
"""

import functools
import importlib
import runpy
import sys
from pathlib import Path
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Modules that read data and write logs. The step does not need them.
importlib.import_module("flax.training.checkpoints")  # looks for the real TensorFlow
_UNUSED = [name for name in ("tensorflow", "input_pipeline", "clu") if name not in sys.modules]
sys.modules.update((name, mock.MagicMock()) for name in _UNUSED)
models, train, utils = map(importlib.import_module, ("models", "train", "utils"))  # files of the example

for _name in _UNUSED:
    del sys.modules[_name]


def program(batch=32, length=128, layers=6, width=512, vocab=30_000, data=1, fsdp=-1, tensor=1):
    """Returns the jitted step with its arguments, (state, batch, ...).

    Args:
        batch: sequences per device, `config.per_device_batch_size`.
        data, fsdp, tensor: number of devices along each mesh axis; -1: all devices that the other axes leave.
    """
    config = runpy.run_path(str(Path(train.__file__).parent / "configs/default.py"))["get_config"]()
    config.update(per_device_batch_size=batch, max_target_length=length, num_layers=layers, emb_dim=width)
    config.update(qkv_dim=width, mlp_dim=4 * width)
    config.update(ici_data_parallelism=data, ici_fsdp_parallelism=fsdp, ici_tensor_parallelism=tensor)
    model_config = models.TransformerConfig(
        vocab_size=vocab,
        output_vocab_size=vocab,
        logits_via_embedding=config.logits_via_embedding,
        dtype=jnp.bfloat16 if config.use_bfloat16 else jnp.float32,
        emb_dim=config.emb_dim,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        qkv_dim=config.qkv_dim,
        mlp_dim=config.mlp_dim,
        max_len=max(config.max_target_length, config.max_eval_target_length),
        dropout_rate=config.dropout_rate,
        attention_dropout_rate=config.attention_dropout_rate,
        kernel_init=nn.initializers.xavier_uniform(),
        bias_init=nn.initializers.normal(stddev=1e-6),
    )
    mesh = Mesh(utils.create_device_mesh(config), config.mesh_axes)
    rate = train.create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    optimizer = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
    model = models.TransformerLM(model_config.replace(deterministic=True))

    # As utils.setup_initial_state does, without its last line, which allocates the state.
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    boxed = jax.eval_shape(functools.partial(utils.init_train_state, model, optimizer, config), key)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, config.logical_axis_rules)
    state = utils.unbox_logicallypartioned_trainstate(boxed)
    tokens = jax.ShapeDtypeStruct((batch * mesh.size, length), jnp.int32)
    step = jax.jit(
        train.train_step,
        in_shardings=(shardings, NamedSharding(mesh, P(config.data_sharding)), None),
        out_shardings=(shardings, None),
        static_argnums=(2, 3, 4),
        donate_argnums=0,
    )
    return step.trace(state, {"inputs": tokens}, model_config, rate, 0.0, key)
