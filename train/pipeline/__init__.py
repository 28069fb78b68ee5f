"""Pipeline parallelism in one SPMD program: computes the gradients of an update with the layers distributed over
stages.

Start with gradients.py, the loop over the ticks of a schedule. stage_units.py has the work of a stage in one tick.
schedule.py builds the table of a pipeline by the schedule's name, divides layers among stages, and computes the idle
fraction and the stored activations. It does not import jax.
"""
