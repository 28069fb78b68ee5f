"""The processes of a run: how they start, stay in contact and end.

In: command-line flags and signals. Out: processes that know each other, and one-line errors. `processes.py` joins the
processes of one run: `rendezvous.py` connects them, `liveness.py` ends all of them when one dies, `stalls.py` finds the
straggler. `signals.py` handles Ctrl-C, `lock.py` locks a run directory, `runtime.py` sets limits of the process,
`failures.py` explains errors.
"""
