"""Our predictions against what real GPUs measured.

In: measured rows of other projects (`data/`, facts with their sources) and the configs that say each of them as nearly
as ours can (`setups_*`). Out: predicted and measured seconds and bytes with their scores. Start at `rows`; `sets` has
the sets by name, `runs` compiles them, one file a row, `score` compares.
"""
