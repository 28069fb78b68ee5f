"""Protos to records, without interpretation: what the compiler wrote, in Python.

In: the bytes of an HloProto (or of an HloModuleProto and a BufferAssignmentProto). Out: `buffers.HloProgram`: the
computations and instructions of the module, its logical buffers, allocations and heap traces, and helpers that walk
them. Start at `buffers.read`. `module` has the instructions and their source lines, `dataflow` where a value comes from
and goes to, `divergence` the collectives that some of their devices skip, `loops` the trip counts,
`mesh` the groups of a collective, `scopes` the scopes in JAX's op_name, `sources` the source lines of stack frames,
`jax_types` the types of what jax traced, lowered and compiled. Needs no jax and reads the proto of any XLA version.

To skip the frames of another framework when the user's line is looked up: add its package to `sources`. To read one
more field: find its number in XLA's hlo.proto and add a branch to the reader of its message.
"""
