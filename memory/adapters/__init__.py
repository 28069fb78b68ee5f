"""Adapters, which make the training steps of other trainers from the trainers' own configs and functions.

An adapter is one file with a subclass of `compare.program_factory.ProgramFactory`. On the command line its programs are
written PREFIX:NAME, such as `maxtext:llama2-7b`, and its keys are the words KEY=VALUE after the target. Start at
`trainers.py`, the table of prefixes. A trainer is imported only when one of its programs is made.
"""
