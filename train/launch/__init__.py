"""The processes of a run: how they start, stay in contact and end.

In: command-line flags and signals. Out: processes that know each other, and one-line errors. `processes.py` joins the
processes of one run: `rendezvous.py` connects them, `liveness.py` finds the straggler and ends all of them when one
dies. `signals.py` handles Ctrl-C, `runtime.py` sets limits of the process, `failures.py` explains errors.
"""
