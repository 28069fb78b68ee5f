"""The training step of Keras 3 (JAX backend), compiled for GPUs that are not there.

    bytescope report keras_gpt.py:program h100:8
    bytescope compare keras_gpt.py:program h100:8 --grid=remat=none,full

The step is `model.train_step`, the function that `model.fit` jits. Replace `build_model` by your own model.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads the variable at import

import jax
import jax.numpy as jnp
import keras


class Block(keras.layers.Layer):
    """A pre-norm decoder layer, recomputed as a whole in the backward pass if `remat` is true."""

    def __init__(self, width, heads, remat):
        super().__init__()
        self.norm1, self.norm2 = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads)
        self.up, self.down = keras.layers.Dense(4 * width, activation="gelu"), keras.layers.Dense(width)
        self.forward = keras.remat(self.compute) if remat else self.compute

    def build(self, shape):
        self.attention.build(shape, shape)
        for layer in (self.norm1, self.norm2, self.up):
            layer.build(shape)
        self.down.build(self.up.compute_output_shape(shape))

    def compute(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.norm2(x)))

    def call(self, x):
        return self.forward(x)


def build_model(vocab, length, width, layers, heads, remat):
    """Returns a decoder-only transformer of `keras.layers`: tokens [batch, length] -> logits [batch, length, vocab]."""
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocab, width)(tokens)
    for _ in range(layers):
        x = Block(width, heads, remat)(x)
    return keras.Model(tokens, keras.layers.Dense(vocab)(keras.layers.LayerNormalization()(x)))


def program(batch=32, length=1024, width=1024, layers=12, heads=16, vocab=50257, remat="none", dtype="mixed_bfloat16"):
    """Returns the jitted step with its arguments, ((state, (tokens, targets))), data-parallel over all devices.

    Args:
        batch: sequences per step, over all devices.
        remat: none, or full: `keras.remat` around each block.
        dtype: dtype policy, such as float32, bfloat16 or mixed_bfloat16.
    """
    keras.config.set_dtype_policy(dtype)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    made = []

    def build():  # traced by eval_shape: no variable gets memory
        model = build_model(vocab, length, width, layers, heads, remat == "full")
        model.compile("adamw", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.optimizer.build(model.trainable_variables)
        made.append(model)

    jax.eval_shape(build)
    model = made[0]
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def spec(variable):
        layout = distribution.get_variable_layout(variable).backend_layout
        return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=layout)

    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([spec(variable) for variable in group] for group in variables)
    data = distribution.get_data_layout(tokens.shape).backend_layout
    tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=data)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(None, shardings))  # as make_train_function does
    return step.trace(state, (tokens, tokens))


program.how = ("remat",)  # type: ignore[attr-defined]  # read by bytescope compare
