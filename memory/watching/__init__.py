"""Runs compiled steps: executables with reports, a watch over a training loop, and out-of-memory post-mortems.

In: any step, plain or jitted, with its arguments. Out: `executable.compile` returns the executable and its report;
`watched.watch` returns a step that is called like the original. Start at `watched.py`, which chooses the executable of
a call. `reporting.py` writes the messages: predicted and measured bytes, and the post-mortem of a step that ran out of
memory (`messages.post_mortem`) as text, page and JSON.
"""
