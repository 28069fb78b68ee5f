"""The training loop, and its printed and recorded output.

Start with `loop.py`: steps, evaluations, saves. `startup.py` prints what is known before the first step,
`initial_state.py` creates or restores the first state, and `summary.py` has the texts of start and end. `display.py`,
`metrics.py`, `step_timer.py` and `profile.py` record the steps. `recorders.py` sends rows to Weights & Biases and
writes the page of the run.
`measured_runs.py` reads the user's measured runs, and `run_correction.py` corrects rates by them, for
`bytescope calibrate --runs`.
"""
