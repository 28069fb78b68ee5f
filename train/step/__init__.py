"""One training step: gradients of micro-batches, two ways to accumulate them, one update.

`modes.py` has the step that the loop calls, `parts.py` what it is made of, `state.py` what persists between steps.
`losses.py` has the cross-entropies, `optimizer/` the update, `fused_backward.py` the update inside the backward pass.
"""
