"""Audits a program: lists what the user's code asks jax or XLA to do, and whether the compiled program does it.

A request is something that the user's code asks for: to recompute or save a value, to offload a value to host memory,
to donate an argument, or to keep an array sharded.

Input: a report with its findings, and the compiled program with its jaxpr. Output: one `records.audit_record.AuditRow`
for each request. Start at `audit_program.py`. Its table `AUDITS` lists the audits, and each audit has its own file.

To add an audit, write a function (report, program) -> iterable of AuditRow and add it to `AUDITS`. Test it with a
program whose request is honored and with a program whose request is not honored.
"""
