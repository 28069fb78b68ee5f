"""Published arithmetic of training memory, FLOPs and communication: no compiler, no jax.

In: the shape of a model, a layout over devices and the names of a precision, an optimizer and a policy, or a trainer's
config. Out: bytes on one device, FLOPs over all devices, bytes of each collective; every formula names its paper.
Start at `estimate.estimate`; `transformer` has activations, `flops` FLOPs, `training_state` the tables of precisions,
optimizers and ZeRO stages, `experts` mixtures of experts, `latent` latent attention, `adapters` LoRA and the weights
that it freezes, `rematerialized` what a policy keeps, `communication` the collectives, `expert_exchange` those of
experts, `reconcile` the formulas compared with a compiled program. A question is asked by a trainer's config
(`config`) or by numbers (`assumed`).

To add an optimizer or a precision: a row of OPTIMIZERS or PRECISIONS in `training_state` with its source; a test
compares the optimizers with what the trainer's program holds.
"""
