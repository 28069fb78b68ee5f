"""Mixtures of experts: a router chooses experts for each token; rows travel to the experts, are multiplied, and
return.

`expert_layer.py` has the forward pass on one screen. `routers.py` chooses experts, `exchange.py` moves rows between
devices, and `expert_kernels.py` multiplies the rows by the weights of their experts.
"""
