"""Turns anyone's program into a compilation, and finds the role of each of its arguments.

In: a function with arguments, a stage of jax or an HLO dump, and a target. Out: a compilation; an `Argument` with its
role for each entry parameter, such as params, optimizer or batch. Start at `compilation.py`: `tracing.py` traces a step
once, `retarget.py` lowers it for another target, `user_program.py` loads a step by its name. Then read
`program_arguments.py`: `state_flow.py` follows values through the module, `pairing.py` matches results with arguments,
and the table of `roles.py` decides by structure first and by names second.

To add a role: a row of ROWS in `memory/records/buffer_records.py`, and rules in `roles.py` where they belong in its
order; a case of each in `tests/memory/program/test_roles.py`.
"""
