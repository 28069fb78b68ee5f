"""Finds the least recomputation within a byte budget: which values each layer keeps, solved exactly and checked by
compiling.

The input is the jaxpr of a loss, a target's rates and a budget in bytes. The output is a plan (patterns of kept and
offloaded values for ranges of layers), and the compiler's figures of every plan that was compiled.

There is one problem (`remat_problem`: a `layer_graph`, rates and budgets), one solver (`remat_solver`) and one search.
Start at `remat_search.RematSearch.run`: it compiles the plans that the solver proposes and corrects its allocation
model by the results. Two modules build the graph of a problem, both from jax's own derivative of a layer:
`named_block` for the blocks of a model that names its values, and `layer_values` for the layers of any loss.
Third-party losses need more modules: `layer_discovery` finds their layers, `jaxpr_sharding` counts the devices over
which a value is sharded, `recognition` recognizes values without names, and `step_loss` has the losses and steps whose
policies can be exchanged. `memory/report/remat_planning.py` uses them.

To give the search more choices, name another value of the block with `checkpoint_name`; the search reads the names
from the jaxpr.

With `jax.config.jax_remat3`, jax has another implementation of `jax.checkpoint`. Layers, plans and reports are the same
with it, except for these differences of jax, measured with jax 0.10.2 and 0.12.0.1:

- Only named values and the results of products can be kept; all other values are recomputed, whatever the policy. A
  name given in the forward rule of a custom gradient has no effect: `remat.policy=megatron` recomputes `probs`.
- jax 0.10.2 ignores every policy except `save_only_these_names`, `save_any_names_but_these`, `dots_saveable`,
  `dots_with_no_batch_dims_saveable` and `everything_saveable`, and recomputes everything instead. It ignores policies
  that offload (`remat.policy=offload`, `offload_dots`), and `RematPolicy`, whose `check` then raises an error: for
  `plan_remat`, switch the flag off. jax 0.12 calls every policy.
- `everything_saveable` keeps only named values with jax 0.10.2. With jax 0.12 it keeps what plain autodiff keeps, and
  the step has another workspace.
- jax 0.10.2 ignores `prevent_cse=False`, and puts optimization barriers around other values. The workspace can differ:
  4 of 112 KiB on two CPU devices, and 0.25 of 113 KiB compiled for two H100, with one product kept per layer.
- jax 0.10.2 gives the marks of all saved values the position of the `jax.checkpoint`. `memory/peak` finds their names
  by the number of their elements and by the operations that made them.
"""
