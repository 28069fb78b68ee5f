"""Finds the least recomputation within a byte budget: which values each layer keeps, solved exactly and checked by
compiling.

The input is the jaxpr of a loss, a target's rates and a budget in bytes. The output is a plan (patterns of kept and
offloaded values for ranges of layers), and the compiler's figures of every plan that was compiled.

There is one problem (`remat_problem`: a `layer_graph`, rates and budgets), one solver (`remat_solver`) and one search.
Start at `remat_search.RematSearch.run`: it compiles the plans that the solver proposes and corrects its allocation
model by the results. Two modules build the graph of a problem, both from jax's own derivative of a layer:
`named_block` for the blocks of a model that names its values, and `layer_values` for the layers of any loss.
Third-party losses need more modules: `layer_discovery` finds their layers, `jaxpr_sharding` counts the devices over
which a value is sharded, `recognition` recognizes values without names, and `loss_gradient` is the training step whose
policies can be exchanged. `memory/report/remat_planning.py` uses them.

To give the search more choices, name another value of the block with `checkpoint_name`; the search reads the names
from the jaxpr.

With `jax.config.jax_remat3` layers, plans and reports are the same, except for what jax itself does differently. Measured
with jax 0.10.2 and 0.12.0.1:

- Only named values and results of products can be kept; other values are recomputed whatever the policy. So is a value
  that the forward rule of a custom gradient names: of `remat.policy=megatron`, `probs`, which costs 2.1 of 65 MFLOP of a
  small step and saves its bytes.
- jax 0.10.2 asks no policy except its own: `save_only_these_names` and `save_anything_except_these_names` for names,
  `dots_saveable` and `dots_with_no_batch_dims_saveable` for products. Plans choose among names, and their policy is a
  `save_only_these_names`. Other policies recompute everything, also those that offload, and a `RematPolicy`, whose
  `check` then raises. jax 0.12 asks every policy, and a plan is the same as without `jax_remat3`.
- `everything_saveable` keeps only named values with jax 0.10.2; with jax 0.12 it keeps everything, as without a
  checkpoint, and its workspace is smaller or larger than without `jax_remat3`.
- jax 0.10.2 ignores `prevent_cse=False`, and gives the marks of saved values the position of the `jax.checkpoint`: their
  names are found by the number of their elements, and by the operations that made them.
"""
