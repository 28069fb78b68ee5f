"""Published arithmetic of training memory, FLOPs and communication: no compiler, no jax.

In: the shape of a model, a layout over devices and the names of a precision, an optimizer and a policy, or a trainer's
config. Out: bytes on one device, FLOPs over all devices, bytes of each collective; every formula names its paper.
Start at `memory_estimate.py`. `transformer_formulas.py` has activations, `training_flops.py` FLOPs, `training_state.py`
the tables of precisions, optimizers and ZeRO stages, `rematerialized.py` what a policy keeps, `communication_volume.py`
the collectives; `reconcile.py` compares the formulas with a compiled program. A question comes from a trainer's config
(`config_formulas.py`) or from numbers (`assumed.py`).

To add an optimizer or a precision: a row of OPTIMIZERS or PRECISIONS in `training_state.py` with its source; a test
compares the optimizers with what the trainer's program holds.
"""
