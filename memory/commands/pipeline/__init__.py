"""The command of a pipeline's schedules."""
