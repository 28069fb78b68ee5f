"""Finds what can be improved in a program: each finding has its bytes and a remedy.

In: a report and the program that it describes, which includes the trainer's description of the step (`ModelFacts`) if a
trainer built it. Out: findings. Start at `finding_rules.py`, whose table lists the rules. Longer rules are in the file
of their subject, such as `state_findings.py`, and read the evidence that `evidence.py` gathers. `user_functions.py`
finds the functions of the user's own code. Remedies use JAX's terms; a trainer replaces them with flags of its
command line, as train/plan/report_remedies.py does.

To add a finding, write a function (report, program) -> RuleResult or None in `finding_rules.py` or in the file of its
subject, and add a row with its remedy to RULES in `finding_rules.py`. The function's name is the kind of the finding.
Test it on a program that has the fault and on one that does not.
"""
