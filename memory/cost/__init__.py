"""What a step computes, moves and sends, and the seconds of that by a roofline.

In: an attributed program or its jaxpr. Out: FLOPs by phase and dtype (`flops`), bytes that kernels read and write
(`kernels`), collectives with what overlaps them (`collectives`, `overlap`), bytes on the host link (`host_transfers`),
all of it as the work of one call (`step_work`), and its seconds at a target's rates (`roofline`). Start at
`step_work.by_phase`, then `roofline.seconds`; `named_tensors` lists checkpoint names with bytes and FLOPs.

To count a new kernel's FLOPs: a row of KERNELS in `flops`, primitive name -> (FLOPs, of them recomputed).
"""
