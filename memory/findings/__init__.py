"""Findings of a report: what can be improved, with its bytes and the remedy.

In: a report and the program that it was made from, with its trainer's facts if it has some. Out: findings. Start at
`finding_rules.py`, whose table lists the rules; they are in the file of their subject, such as `state_findings.py`, and
read what `evidence.py` gathers. `replicated_arrays.py` finds arrays that lost their sharding, `user_functions.py` the
functions of the user's own code, `post_mortem.py` what is known when memory ran out. Remedies are in JAX's words: a
trainer puts the flags of its own command line in their place, as train/plan/report_remedies.py does.

To add a finding: a function (report, program) -> Found or None in the file of its subject, and a row of RULES in
`finding_rules.py` with its remedy in JAX's words; the function's name is the finding's kind. Test it on a program that
has the fault and on one that lacks it.
"""
