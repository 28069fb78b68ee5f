"""Counts what a step computes, moves and sends, and bounds its time by a roofline.

In: an attributed program or its jaxpr. Out: FLOPs by phase and dtype (`flops.py`), bytes that kernels read and write
(`kernel_costs.py`), collectives with what overlaps them (`collectives.py`, `overlap.py`), bytes on the host link
(`host_transfers.py`), their sum for one call (`step_work.py`), and its seconds at a target's rates (`roofline.py`).
Start at `step_work.py`; `named_tensors.py` lists checkpoint names with bytes and FLOPs.

To count the FLOPs of another kernel: a row of KERNELS in `flops.py`, primitive name -> (FLOPs, recomputed FLOPs).
"""
