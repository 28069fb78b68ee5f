"""Predicts the seconds of a compiled step on a target.

In: the compiled schedule, kernel by kernel, and the rates that the target's devices reach. Out: seconds with a spread.
Start at `step_prediction`. `reading` makes the schedule of a module, with the work of its kernels from `products`;
`step_schedule` has its records. `rates` selects the rates of a device, `operation_seconds` prices one kernel or
transfer at these rates, and `schedule_walk` runs the schedule on the streams of one device. `constants` has the fitted
constants and the measured errors. All modules except `reading` are pure: records in, seconds out.
"""
