"""The training step of Levanter's `Trainer`, compiled for GPUs that are not there.

    uv pip install --prerelease=allow levanter gitpython chex 'jax[cuda13]==0.10.2'
    bytescope report levanter_llama.py:program h100:8
    bytescope compare levanter_llama.py:program h100:8 --grid=remat=full,true,save_all --grid=microbatch=1,4

Model, optimizer, loss, axis mappings and the jitted step are Levanter's own.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample, compute_next_token_loss
from levanter.optim import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState

CHECKPOINTING = {"true": True, "false": False}  # other values are Levanter's names: full, offload, nested, save_all


def mean(loss, axis=None, where=None):
    """`hax.mean` with a boolean mask: jax 0.10 refuses the float mask of Levanter 1.2.dev1644."""
    return hax.mean(loss, axis, where=where != 0)


def program(
    batch=64,
    microbatch=-1,
    length=2048,
    width=4096,
    mlp=11008,
    layers=32,
    heads=32,
    kv_heads=32,
    vocab=32000,
    remat="true",
    fsdp=True,
    tensor=1,
    loss_block=0,
    policy="p=f32,c=bfloat16",
):
    """Returns Levanter's training step, traced. Levanter's name of an argument is in parentheses.

    Args:
        batch: sequences per step, over all devices (`train_batch_size`).
        microbatch: sequences per device and forward pass (`per_device_parallelism`); -1: no accumulation.
        remat: true, false, full, offload, nested or save_all (`gradient_checkpointing` of the model).
        fsdp: shards parameters and optimizer state along the axis `embed` (`fsdp_axis`).
        tensor: number of devices that share the axes `mlp` and `heads` (`model_axis_size`).
        loss_block: tokens of the vocabulary per block of the loss (`cross_entropy_block_size`); 0: all at once.
        policy: dtypes of parameters and compute, as a policy of the package jmp (`mp`).
    """
    model_config = LlamaConfig(
        seq_len=length,
        hidden_dim=width,
        intermediate_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        gradient_checkpointing=CHECKPOINTING.get(remat, remat),
        cross_entropy_block_size=loss_block or None,
    )
    config = TrainerConfig(
        id="recipe",
        tracker=NoopConfig(),
        mp=jmp.get_policy(policy),
        train_batch_size=batch,
        per_device_parallelism=microbatch,
        model_axis_size=tensor,
        fsdp_axis="embed" if fsdp else None,
        tensor_parallel_axes=["mlp", "heads"] if tensor > 1 else None,
    )
    config._validate_and_set_defaults()  # `initialize` calls it, and would refuse a machine without an accelerator
    optimizer = AdamConfig().build(config.num_train_steps)
    loss = functools.partial(compute_next_token_loss, reduction=mean)
    trainer = Trainer(config, optimizer, loss, add_default_hooks=False)

    def init(key):
        model = model_config.build(hax.Axis("vocab", vocab), key=key)
        return TrainerState.init(optimizer, model, key=key, is_trainable=True, mp=trainer.mp)

    def example():
        tokens = hax.zeros((trainer.TrainBatch, model_config.Pos), dtype=jnp.int32)
        return LmExample(tokens, hax.ones_like(tokens), AttentionMask.causal())

    with trainer:
        arguments = eqx.filter_eval_shape(init, jax.random.PRNGKey(0)), eqx.filter_eval_shape(example)
        arrays, static = eqx.partition(arguments, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        mappings = trainer.parameter_axis_mapping, trainer.compute_axis_mapping
        shardings = tuple(map(hax.partitioning.infer_resource_partitions, arrays, mappings))

        def train_step(state, example):
            state, example = eqx.combine((state, example), static)
            result = trainer._jit_train_step_fn_no_hook(state, (example,), {})
            return result.loss, eqx.filter(result.new_state, eqx.is_array)

        step = jax.jit(train_step, donate_argnums=0, in_shardings=shardings, out_shardings=(None, shardings[0]))
        return step.trace(*arrays)


program.how = ("remat", "microbatch", "fsdp", "tensor")  # type: ignore[attr-defined]  # read by bytescope compare
