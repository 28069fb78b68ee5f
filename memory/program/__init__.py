"""Compiles any user's program and finds the role of each of its arguments.

In: a function with arguments, a jax stage or an HLO dump, and a target. Out: a compilation, and for each entry
parameter an `Argument` with its role, such as params, optimizer or batch. Start at `compilation.py`: `tracing.py`
traces a step once, `retarget.py` lowers it for another target, `user_program.py` loads a step by its name. Then read
`program_arguments.py`: `state_flow.py` follows values through the module, `pairing.py` matches results with arguments,
and the table in `roles.py` decides by structure first and by names second.

To add a role, add a row to ROWS in `memory/records/buffer_records.py`, rules at their place in the order of
`roles.py`, and one test case per rule in `tests/memory/program/test_roles.py`.
"""
