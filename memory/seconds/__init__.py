"""How long a compiled step takes on a target.

In: the compiled schedule, kernel by kernel, and the rates that the target's devices reach. Out: seconds with a spread.
Start at `step_prediction`. `reading` makes the schedule of a module, `step_schedule` has its records, `rates` selects
the rates of a device, `schedule_walk` executes the schedule at those rates, `spread` has the measured errors. All but
`reading` is pure: records in, seconds out.
"""
