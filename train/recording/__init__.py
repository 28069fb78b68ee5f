"""Where the rows of a run go besides metrics.jsonl.

In: rows of metrics, the config, the report of the step, the sample. Out: TensorBoard's events, a run at Weights &
Biases, the page of the run. Start at `recorders.py`: `Recorders` is what the loop holds. To add one, write a class with
`write`, `finish` and `close` beside them and start it there; `tensorboard.TAGS` has the names of the curves.
"""
