"""Pipeline parallelism in one SPMD program: a config's layers over stages in, gradients of an update out.

Start at gradients.py, the loop over the ticks of a schedule; stage_units.py is what a stage does in one of them.
schedule.py is the table of a pipeline and divides layers over stages, schedules.py makes each table by name,
schedule_figures.py has their bubble and stash. These and published_schedules.py import no jax.
"""
