"""Subjects of commands: a user's function, an XLA dump, a program of another trainer, a saved result.

The trainer's configs are in `train.plan.config_subject`; the table of all kinds is in `train.commands.subjects`.
"""
