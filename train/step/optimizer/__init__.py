"""The update: turns gradients summed over tokens into new parameters and optimizer state, by `config.optimizer`.

Start with `rules.py`: the table of optimizers, clipping and the schedule. `adam_8bit.py` and `param_matrices.py` have
the optimizers that optax lacks, `rounding.py` applies an update, and `loss_scale.py` scales the loss for float16.
`partwise.py` updates layer by layer, and `host_offload.py` moves state to pinned host memory.
"""
