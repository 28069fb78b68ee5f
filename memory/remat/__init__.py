"""The least recomputation under a byte budget: which tensors each block keeps, by integer program and compiler.

In: the jaxpr of a block, a target's rates and a budget in bytes. Out: a plan, that is patterns of kept and offloaded
names for ranges of layers, the keys of a config that run it, and what the compiler said of every plan that was tried.
Start at `search.Search.run`; `block_graph` reads the block, `patterns` lists what it can keep, `ilp` solves for the
cheapest plan, `allocation_model` predicts what the compiler allocates, `problem` has the records between them.

For a model that is not ours `layers` finds the layers in the jaxpr of its loss, `values` reads what they can keep from
jax's own derivative, `shards` says over how many devices that is sharded, `worth` leaves out what is never worth
keeping, `recognition` is the policy that tells values without names apart, and `gradient` the training step whose
policies can be exchanged; `memory/report` compiles.

To give the search more choices: name another tensor of the block with `checkpoint_name`; names are read from the
jaxpr.
"""
