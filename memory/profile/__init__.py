"""What a run measured: where the time of traced updates went, and what its run directory holds.

In: a folder or file of a trace (`*.xplane.pb`). Out: `breakdown.Breakdown`, the seconds of an update by phase and
component with the idle time of the device and the host's work meanwhile. Start at `breakdown.find`; `xplane` reads the
file without jax, `op_scopes` tells the phase and component of an instruction, `annotate` writes these into the trace.
`run_directory` reads the files of a run by their formats.

To add a component: a word of COMPONENTS in `hlo/scopes.py`; the report and the trace use the same names.
"""
