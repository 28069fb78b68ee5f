"""How long a compiled step takes on a target.

In: the compiled schedule, kernel by kernel, and the rates that the target's devices reach. Out: seconds with a spread.
Start at `schedule`, the records of a schedule; `reading` makes them of a module, `rates` says what a device reaches,
`walk` goes through one at the other, `prediction` adds the spread. All but `reading` is pure: records in, seconds out.
"""
