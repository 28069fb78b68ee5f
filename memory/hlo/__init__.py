"""Protos to records, without interpretation: what the compiler wrote, in Python.

In: the bytes of an HloProto (or of an HloModuleProto and a BufferAssignmentProto). Out: `buffers.Program`, that is the
module's computations and instructions, its logical buffers, allocations and heap traces, and helpers that walk them.
Start at `buffers.read`; `module` has the instructions, `frames` the table of source places, `dataflow` where a value
comes from and goes to, `divergence` the collectives that some of their devices skip, `loops` the trip counts, `mesh`
the groups of a collective, `scopes` the scopes in JAX's op_name, `sources` the source lines of its stack frames. Needs
no jax and reads any XLA version's proto.

To add a framework whose code is passed through on the way to the user's line: its package in `sources`. To read one
more field: find its number in XLA's hlo.proto and add a branch in the reader of its message.
"""
