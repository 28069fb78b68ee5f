"""Published arithmetic of training memory, FLOPs and communication: no compiler, no jax.

In: the shape of a model, a layout over devices, a precision and an optimizer (`Question`), or all that a trainer knows
of its step (`model_facts.py`). Out: bytes on one device, FLOPs over all devices, bytes of each collective; every
formula names its paper. No trainer's config is read here.
Start at `memory_estimate.py`. `transformer_formulas.py` has activations, `training_flops.py` FLOPs, `training_state.py`
parameters, gradients and optimizer state, `rematerialized.py` what a policy keeps, `communication_volume.py` the
collectives; `reconcile.py` compares the formulas with a compiled program.
"""
