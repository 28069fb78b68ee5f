"""What every buffer of a compiled program is: category, phase, component, checkpoint name, source line.

In: a parsed program (`hlo.buffers.Program`), what its arguments are, its jaxpr where there is one. Out: the
buffers, timeline, breakdown and ledger of a `records.Report`. Start at `assemble.report`; `rules` decides the category
of a buffer, `logits` finds the head's, `lifetimes` reads the heap trace and `schedule` replaces one,
`runtime_overheads` has what no compiler counts.
"""
