"""The page of a pipeline's schedules."""
