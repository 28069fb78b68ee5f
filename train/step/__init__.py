"""One training step: gradients of micro-batches, two ways to accumulate them, one update.

`train_step.py` has the step that the loop calls, `state.py` the state that persists between steps. `losses.py` has the
cross-entropies, `optimizer/` the update, `fused_backward.py` the update inside the backward pass.
"""
