"""Mixtures of experts: a router chooses experts for each token, the rows travel to them, are multiplied, and return.

`layer.py` has the forward pass on one screen; `routers.py` chooses, `exchange.py` moves rows between devices,
`kernels.py` multiplies them by the weights of their experts.
"""
