"""The training step of tunix's `PeftTrainer`, compiled for GPUs that are not there.

    pip install google-tunix
    bytescope report tunix_llama.py:program h100:8
    bytescope compare tunix_llama.py:program h100:8 --grid=remat=none,block,decoder --grid=rank=0,16

Model, shardings, loss and the jitted step are tunix's own. LoRA adapters are qwix's, as in tunix's examples.
Parameters are bfloat16, as tunix loads them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.models.llama3 import model as llama3
from tunix.sft import peft_trainer, utils

ADAPTED = ".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*up_proj|.*down_proj"


def shard(x, spec):
    return jax.lax.with_sharding_constraint(x, P(*spec))


# tunix leaves its constraints on activations out if the first device is a CPU, which it is while a step is traced here.
llama3.shard = shard


def program(
    model="llama3p1_8b", layers=0, batch=8, length=2048, rank=16, remat="none", dtype="bfloat16", fsdp=-1, tp=1
):
    """Returns tunix's training step, traced.

    Args:
        model: a constructor of `llama3.ModelConfig`, such as llama3p2_1b or llama3_70b.
        layers: number of layers; 0: all layers of the model.
        batch: sequences per step, over all devices.
        rank: rank of the LoRA adapters; 0 trains all parameters.
        remat: a value of tunix's `RematConfig`: none, block (attention and MLP separately) or decoder (whole layers).
        fsdp, tp: number of devices along each mesh axis; -1: all devices that the other axis leaves.
    """
    config = getattr(llama3.ModelConfig, model)()
    config = dataclasses.replace(
        config, num_layers=layers or config.num_layers, remat_config=llama3.RematConfig[remat.upper()]
    )
    sizes = [jax.device_count() // tp if fsdp == -1 else fsdp, tp]
    mesh = jax.make_mesh(sizes, ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    steps = []

    def build():  # traced by eval_shape: no parameter gets memory
        rngs = nnx.Rngs(0)
        network = llama3.Llama3(config, rngs=rngs)
        nnx.update(network, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(network, nnx.Param)))
        if rank:
            provider = qwix.LoraProvider(module_path=ADAPTED, rank=rank, alpha=2.0 * rank)
            network = qwix.apply_lora_to_model(network, provider, rngs=rngs, **network.get_model_input())
        trainer = peft_trainer.PeftTrainer(
            network, optax.adamw(1e-5), peft_trainer.TrainingConfig(eval_every_n_steps=1)
        )
        trainer.with_gen_model_input_fn(model_input)
        train_step, _ = trainer.jit_train_and_eval_step()
        steps.append(train_step.func)
        return train_step.args  # model and optimizer

    def model_input(inputs):
        mask = inputs.input_tokens != 0
        attention_mask = utils.make_causal_attn_mask(mask)
        positions = utils.build_positions_from_mask(mask)
        tokens = {"input_tokens": inputs.input_tokens, "input_mask": inputs.input_mask}
        return {**tokens, "positions": positions, "attention_mask": attention_mask}

    def place(node):
        state = nnx.state(node)

        def spec(leaf, axes):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, axes or P()))

        nnx.update(node, jax.tree.map(spec, state, nnx.get_partition_spec(state)))
        return node

    with mesh:
        nodes = [place(node) for node in nnx.eval_shape(build)]
        data = NamedSharding(mesh, P("fsdp"))
        tokens, mask = (jax.ShapeDtypeStruct((batch, length), kind, sharding=data) for kind in (jnp.int32, jnp.bool))
        return steps[0].trace(*nodes, peft_trainer.TrainingInput(tokens, mask))


program.how = ("remat", "fsdp", "tp")  # type: ignore[attr-defined]  # read by bytescope compare
