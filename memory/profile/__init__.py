"""Breaks down the time of profiled updates: seconds by phase and component, idle time of the device, and work of the
host.

The input is a trace file (`*.xplane.pb`) or a folder that contains one. Start at `breakdown.find`, which returns a
`breakdown.Breakdown`. `xplane` reads the file without jax, `kernel_owners` finds the instruction of each kernel inside
a CUDA graph, and `op_scopes` looks up the phase and component of an instruction. `instruction_seconds` compares the
measured seconds of each instruction with the predicted ones.

To add a component, add a word to COMPONENTS in `hlo/scopes.py`; the report and the trace use the same names.
"""
