"""What an expert would point at in a report, and what to do about it.

In: a `ReportRecord` and the program that it was made from. Out: findings with their bytes and the remedy. Start at
`rules.find`; its table has the rules of `state`, `activations`, `checkpointing`, `spare_memory`, `sharding`, `experts`
and `host`, which look at what `evidence` gathers; `replicated` finds arrays that lost their sharding, `functions` the
user's own code. The room `remedies` has what the config of a step that does not fit has left to try; `post_mortem`
tells what was known when memory ran out.

To add a finding: a function (report, program) -> Found or None in the module of its subject, and a row of RULES in
`rules` with its remedy in JAX's words; the function's name is the finding's kind. Test it on a program that has the
fault and on one that lacks it.
"""
