"""Audits a program: lists each request to jax and XLA (recompute, save, offload, donate, divide) with its outcome

In: a judged report and the parsed program with its jaxpr. Out: `records.audit_record.AuditRow`. Start at
`audit_program.py`, whose table `AUDITS` lists the audits; each of them is in the file of its subject.

To add an audit, write a function (report, program) -> iterable of AuditRow in the file of its subject and add it to
`AUDITS`. Test it on a program whose request is honored and on one whose request is undone.
"""
