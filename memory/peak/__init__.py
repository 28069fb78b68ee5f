"""Attributes every buffer of a compiled program: category, phase, component, checkpoint name and source line.

The input is a parsed program (`hlo.buffers.HloProgram`), the roles of its arguments, and its jaxpr if it was traced.
The output is the buffers, timeline, breakdown and ledger of a report. Start at `assemble.build_account`, which reads
the heap trace. `buffer_rules` decides the category of a buffer and finds the logits, `naming` and `checkpoint_names`
find its names, `buffer_placement` finds how activations are sharded, `live_schedule` derives a heap trace from the
schedule if there is none, `ledger` sums the training state, `runtime_overheads` lists memory that the compiler's
report does not contain. `memory_order` estimates the peak in an order of least memory, and `xla_passes` computes the
memory that XLA plans with, and lists the values that XLA recomputes and the buffers that its schedule holds.
"""
