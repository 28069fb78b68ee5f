"""What every buffer of a compiled program is: category, phase, component, checkpoint name, source line.

In: a parsed program (`hlo.buffers.HloProgram`), the roles of its arguments, and its jaxpr if it was traced. Out: the
buffers, timeline, breakdown and ledger of a report. Start at `assemble.account_of`, which reads the heap trace.
`buffer_rules` decides the category of a buffer and finds the logits, `live_schedule` derives live ranges from the
schedule if there is no heap trace, `runtime_overheads` lists the bytes that no compiler counts.
"""
