"""The training loop, and what it prints and records.

Start with `loop.py`: steps, evaluations, saves. `startup.py` prints what is known before the first step,
`initial_state.py` makes or restores the first state, `summary.py` has the words of start and end. `display.py`,
`metrics.py`, `step_timer.py` and `profile.py` record the steps. `recorders.py` sends rows to TensorBoard, Weights &
Biases and the page of the run; to add a recorder, write a class with `write`, `finish` and `close` and start it there.
"""
