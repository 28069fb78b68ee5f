"""Finds the configuration to run, from a budget and the batch of an update.

Start with `fit_walk.Walk`, which goes from variant to variant. `fit_space` is what it may change, `fit_step` one
variant that was tried, `fit_reach` the ranks and lengths that adapters go to, `fit_result` the JSON of all of it.
"""
