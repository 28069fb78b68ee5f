"""Starts the processes of a run, keeps them in contact and ends them.

In: command-line flags and signals. Out: connected processes, and errors of one line. `processes.py` joins the
processes of one run: `rendezvous.py` connects them, `liveness.py` names the straggler and ends all processes when one
dies. `signals.py` handles Ctrl-C, `runtime.py` checks the limits of the process, `failures.py` explains errors.
"""
