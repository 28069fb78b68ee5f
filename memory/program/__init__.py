"""What the arguments of a program are: parameters, an optimizer's state, caches, random keys, data.

In: a parsed program (`hlo.buffers.HloProgram`) and, where jax told it, its signature (`devices.signature`). Out: an
`Argument` for each entry parameter, and which values are on the way to which parameter's update. Start at
`program_arguments.read`: `state_flow` follows values through the module, `pairing` finds what comes back, and the table
of `roles` decides, structure first and names second.

To add a role: a row of `records.ROWS`, of `roles.ROLES`, and rules of `roles.RULES` where they belong in its order; a
case of each in tests/memory/program/test_roles.py.
"""
