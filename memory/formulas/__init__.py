"""Published formulas for the memory, FLOPs and communication of training: plain arithmetic without a compiler or jax.

In: the shape of a model, a layout over devices, a precision and an optimizer (`Question`), or all facts that a trainer
knows about its step (`model_facts.py`). Out: bytes on one device, FLOPs over all devices, bytes of each collective.
Every formula names its paper. The package reads no trainer's config.

Start at `memory_estimate.py`. `transformer_formulas.py` has activations and FLOPs, `training_state.py`
parameters, gradients and optimizer state, `rematerialized.py` the residuals under a remat policy, and
`communication_volume.py` the collectives. `reconcile.py` compares the formulas with a compiled program.
"""
