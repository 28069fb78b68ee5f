"""The terminal's view of a pipeline's schedule."""
