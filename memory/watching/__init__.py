"""Compiled steps that run: the executable beside its report, a watch over a loop, what is known where memory ran out.

In: a step of anyone's, plain or jitted, with its arguments. Out: `executable.compile`, the executable with the report
of that very executable, and `watched.watch`, a step that is called as before. Start at `watched.py`, which decides what
a call runs; `telling` has all that it says, `measured` what it compares; `failure` gathers what a device holds where a
step runs out of memory, and writes `findings.post_mortem` as text, page and JSON.
"""
