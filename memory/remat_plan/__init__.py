"""`plan_remat`: what the layers of anyone's model keep for their backward pass, certified by the compiler.

In: a loss, its arguments, a target and a budget. Out: a plan with a policy for `jax.checkpoint`, its account, and the
report of the program under it. Start at `plan.plan_remat`: `compiler` compiles the training step under each policy that
the search of `memory/remat` asks for, `account` prints.
"""
