"""What an expert would point at in a report, and what to do about it.

In: a `records.Report` and the program that it was made from. Out: findings with their bytes and the remedy. Start at
`rules.find`; its table has the rules of `state`, `activations`, `checkpointing`, `spare_memory`, `sharding` and `host`,
which look at what `evidence` gathers; `replicated` finds arrays that lost their sharding, `functions` the user's own
code. For a step that does not fit, `open_levers` has what its config has left to try and `advice` says it;
`post_mortem` tells what was known when memory ran out.

To add a finding: a function (report, program) -> Found or None in the module of its subject, and a row of RULES in
`rules` with its remedy in JAX's words; the function's name is the finding's kind. Test it on a program that has the
fault and on one that lacks it. To add a lever of the advice: a function (case) -> Lever or None in `open_levers`, in
LEVERS where its cost belongs.
"""
