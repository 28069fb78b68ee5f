"""What every buffer of a compiled program is: category, phase, component, checkpoint name, source line.

In: a parsed program (`hlo.buffers.HloProgram`), the roles of its arguments, and its jaxpr if it was traced. Out: the
buffers, timeline, breakdown and ledger of a report. Start at `assemble.account_of`. `buffer_rules` decides the category
of a buffer, `logits` finds the logits, `lifetimes` reads the heap trace, `live_schedule` derives one from the schedule
if there is none, `runtime_overheads` lists the bytes that no compiler counts.
"""
