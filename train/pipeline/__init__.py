"""Pipeline parallelism in one SPMD program: computes the gradients of an update with the layers distributed over
stages.

Start with gradients.py, the loop over the ticks of a schedule. stage_units.py has the work of a stage in one tick.
schedule.py has the table of a pipeline and assigns layers to stages, schedules.py builds each table by name, and
schedule_figures.py computes their idle fraction and stored activations. These three do not import jax.
"""
