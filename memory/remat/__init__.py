"""The least recomputation within a byte budget: the values that each layer keeps, solved exactly, checked by compiling.

In: the jaxpr of a loss, a target's rates and a budget in bytes. Out: a plan (patterns of kept and offloaded values for
ranges of layers), and the compiler's figures of every plan that was compiled.

There is one problem (`remat_problem`: a `layer_graph`, rates and budgets), one solver (`remat_solver`) and one search:
`remat_search.RematSearch.run` compiles what the solver proposes and corrects its allocation model by the result. Start
there. Two modules build the graph of a problem, both from jax's own derivative of a layer: `named_block` for the blocks
of a model that names its values, `layer_values` for the layers of any loss. Third-party losses need more:
`layer_discovery` finds their layers, `jaxpr_sharding` says over how many devices a value is sharded, `recognition`
recognizes values without names, and `loss_gradient` is the training step whose policies can be exchanged;
`memory/report/remat_planning.py` uses them.

To give the search more choices: name another value of the block with `checkpoint_name`; names are read from the jaxpr.
"""
