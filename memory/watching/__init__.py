"""Compiled steps that run: an executable with its report, a watch over a training loop, out-of-memory post-mortems.

In: any step, plain or jitted, with its arguments. Out: `executable.compile` returns the executable and the report of
that executable; `watched.watch` returns a step that is called as before. Start at `watched.py`, which decides what a
call runs. `reporting` writes its messages: predicted and measured bytes, and, for a step that ran out of memory, the
arrays that the device holds and the post-mortem (`findings.post_mortem`) as text, page and JSON.
"""
