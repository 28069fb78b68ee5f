"""Anyone's step, traced once and lowered for a target.

In: a function, plain or wrapped by some library's jit, with its arguments, and a `devices.targets.Target`. Out: a
`jax.stages.Lowered` for the target's devices, here or not, for `devices.compiler`. Start at `tracing.traced`;
`retarget` lowers what was traced for another target, where `place` says each part of it goes; `callbacks` puts calls
of Python into programs for devices that are not here.
"""
