"""What every buffer of a compiled program is: category, phase, component, checkpoint name, source line.

In: a parsed program (`hlo.buffers.Program`), the roles of its arguments, its jaxpr where there is one. Out: the
buffers, timeline, breakdown and ledger of a `records.Report`, and the findings. Start at `assemble.report`; `rules`
decides the category of a buffer, `roles` that of an argument by its path, `lifetimes` reads the heap trace and
`schedule` replaces one, `runtime_overheads` has what no compiler counts. For a step that does not fit, `open_levers`
has what its config has left to try and `advice` says it.

To add a lever of the advice: a function (case) -> Lever or None in `open_levers`, in LEVERS where its cost belongs.
To add a finding: a function (report, program) -> (bytes, message) or None, and a row of RULES in `findings` with its
remedy; the function's name is the finding's kind. Test it on a program that has the fault and on one that lacks it.
"""
