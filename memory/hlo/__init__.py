"""Reads the compiler's protos into Python records, without interpretation.

The input is the bytes of an HloProto (or of an HloModuleProto and a BufferAssignmentProto). The output is a
`buffers.HloProgram`: the computations and instructions of the module, its logical buffers, allocations and heap traces.
Start at `buffers.read`. `module` has the instructions, their source lines and the graph between them, `kernels` the
table of custom calls, `dataflow` follows values to their origins and users, `loops` has trip counts, `mesh` the device
groups of a collective, `scopes` the scopes in JAX's op_name, `sources` the source lines of stack frames, and
`jax_types` the types of jax's traced, lowered and compiled stages. The package needs no jax and reads the proto of any
XLA version.

To skip the stack frames of another framework on the way to the user's line, add its package to `sources`. To read one
more field, find its number in XLA's hlo.proto and add a branch to the reader of its message. To recognize the
calls of another library, add a row to `kernels.CALLS`.
"""
