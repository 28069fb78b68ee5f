"""What every buffer of a compiled program is: category, phase, component, checkpoint name, source line.

In: a parsed program (`hlo.buffers.HloProgram`), the roles of its arguments, and its jaxpr if it was traced. Out: the
buffers, timeline, breakdown and ledger of a report. Start at `assemble.account_of`, which reads the heap trace.
`buffer_rules` decides the category of a buffer and finds the logits, `naming` and `checkpoint_names` find its names,
`buffer_placement` its sharding, `live_schedule` derives a heap trace from the schedule if there is none, `ledger` adds
up the state, `runtime_overheads` lists memory that the compiler's report does not contain.
"""
