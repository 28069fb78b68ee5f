"""Schedules of pipelines: which stage does what in which tick, where residuals lie, and the figures of it. No jax."""
