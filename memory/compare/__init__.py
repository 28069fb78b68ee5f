"""Many programs compared with each other: compare, levers, front and fit, for a trainer that meets a Protocol.

In: a config's name, overrides, a target and a `trainer.Trainer`. Out: rows of figures by configuration (`rows`),
stages of memory levers (`levers`), the front of least recomputation by budget (`frontier`), the fastest configuration
that fits (`fit`). Each program is a job (`jobs`), compiled in a worker process (`pool`, `worker`) and remembered on
disk (`cache`). Start at `pool.run` for how a program is compiled, at `rows.Row` for what is kept of it.

To add a stage of levers: a row of STAGES in `levers`; a way to shrink a step: a row of SQUEEZES in `fit.space`.
"""
