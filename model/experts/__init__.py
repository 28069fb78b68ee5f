"""Mixtures of experts: a router chooses experts for each token, the rows travel to them, are multiplied, and return.

`expert_layer.py` has the forward pass on one screen; `routers.py` chooses, `exchange.py` moves rows between devices,
`expert_kernels.py` multiplies them by the weights of their experts.
"""
