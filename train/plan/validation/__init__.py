"""Compares our predictions with published measurements on real GPUs.

Input: rows that other projects measured (`data/`, with their sources), and for each row the config that comes nearest
to the measured program (`setups_*`). Output: predicted and measured seconds and bytes, with scores. Start at
`measured_rows`, which lists the sets of rows; `validation_runs` compiles the rows, and `validation_score` compares
them.
"""
