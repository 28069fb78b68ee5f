"""One training step: gradients of micro-batches, two ways to accumulate them, and the update.

`train_step.py` has the step that the loop calls, and `state.py` the state that persists between steps. `losses.py` has
the cross-entropies, `optimizer/` the update, and `fused_backward.py` the update inside the backward pass.
"""
