"""The update: gradients summed over tokens and `config.optimizer` in; new parameters and optimizer state out.

Start with `rules.py`: the table of optimizers, clipping and the schedule. `adam_8bit.py` and `param_matrices.py` have
the rows that optax lacks, `rounding.py` applies an update, `loss_scale.py` guards float16. `partwise.py` updates layer
by layer, `host_offload.py` with state in pinned host memory.
"""
