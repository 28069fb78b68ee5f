"""Counts the FLOPs, the bytes moved and the messages of a step, and bounds its time by a roofline.

The input is an attributed program or its jaxpr. `flops.py` counts FLOPs by phase and dtype, `kernel_costs.py` the
bytes that kernels read and write, `collectives.py` the collectives and the compute that overlaps them,
`host_transfers.py` the bytes on the host link. `step_work.py` sums them for one call, and `roofline.py` computes the
seconds at a target's rates. Start at `step_work.py`. `named_tensors.py` lists checkpoint names with bytes and FLOPs.

To count the FLOPs of another kernel, add a row to KERNELS in `flops.py`: primitive name -> function that returns
(FLOPs, recomputed FLOPs).
"""
