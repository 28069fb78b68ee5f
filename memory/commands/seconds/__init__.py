"""The subcommands about seconds: what devices reach, and predictions beside what was measured.

In and out as in the room above. Start at calibrate.py, which measures the rates of `--rates=FILE`.
"""
