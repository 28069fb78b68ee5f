"""Finds the fastest configuration that fits a memory budget and has a given number of tokens per update.

Start with `fit_walk.Walk`, which tries one variant of a config after the other. `fit_space` says what the search may
change, `fit_reach` finds the adapter ranks and sequence lengths that fit, `fit_result`
writes the JSON of the result.
"""
