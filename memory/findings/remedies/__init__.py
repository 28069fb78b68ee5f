"""What a config of the trainer's has left to try: levers, the flags of a remedy, advice for a step that does not fit.

In: a `records.ReportRecord` whose `config` was compiled. Out: keys of the config to change, as flags to copy. Start at
`open_levers`: the memory levers that a `case` has not used yet, cheapest first; `config_flags` are the flags of a
finding's remedy, `advice` puts levers in words, those that a caller has compiled first.

To add a lever: a function (case) -> Lever or None in `open_levers`, in LEVERS where its cost belongs.
"""
