"""Predicts the seconds of a compiled step on a target, with a spread.

The input is the compiled schedule, kernel by kernel, and the rates that the target's devices reach. Start at
`step_prediction`. `reading` reads the schedule of a module into the records of `records/schedule_records`, with the
work of its kernels from `products`. `rates` selects the rates of a device, `operation_seconds` computes the seconds of
one kernel or transfer at these rates, and `schedule_walk` simulates the schedule on the streams of one device.
`constants` has the fitted constants and the measured errors. All modules except `reading` work on plain records.
"""
