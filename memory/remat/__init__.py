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
"""
