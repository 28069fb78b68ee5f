"""What a profiled run measured: where the time of the traced updates went.

In: a folder or file of a trace (`*.xplane.pb`). Out: `breakdown.Breakdown`: the seconds of an update by phase and
component, the idle time of the device, and the host's work. Start at `breakdown.find`. `xplane` reads the file without
jax, `op_scopes` looks up the phase and component of an instruction, `annotate` writes them into the trace.

To add a component: add a word to COMPONENTS in `hlo/scopes.py`; the report and the trace use the same names.
"""
