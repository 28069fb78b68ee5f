"""Our predictions against what real GPUs measured.

In: rows that other projects measured (`data/`, facts with their sources) and the configs of ours nearest to them
(`setups_*`). Out: predicted and measured seconds and bytes with their scores. Start at `measured_rows`, which has the
sets by name; `validation_runs` compiles them, one file a row; `validation_score` compares.
"""
