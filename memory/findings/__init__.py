"""Findings of a report: what can be improved, with its bytes and the remedy.

In: a report and the program that it was made from, with its trainer's facts if it has some. Out: findings. Start at
`finding_rules.py`, whose table lists the rules; longer rules are in the file of their subject, such as
`state_findings.py`, and read the evidence that `evidence.py` gathers. `user_functions.py` finds the functions of the
user's own code, `post_mortem.py` holds the records of a step that ran out of memory. Remedies are in JAX's words: a
trainer replaces them with the flags of its own command line, as train/plan/report_remedies.py does.

To add a finding: a function (report, program) -> Found or None in `finding_rules.py` or in the file of its subject, and
a row of RULES in `finding_rules.py` with its remedy in JAX's words; the function's name is the finding's kind. Test it
on a program that has the fault and on one that lacks it.
"""
