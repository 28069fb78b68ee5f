"""Where the trainer meets `bytescope.memory`: plans before the first step, and the memory that a run takes besides it.

In: a config, and devices or a target. Out: what commands and workers of `memory` ask a trainer (`adapter`), a config
with `remat.policy=auto` settled (`remat_auto`, which sees a program's `block`), the configuration of `train --fit`
(`fit`), the bytes of a run outside the step (`run_peak`), and advice for a step that does not fit (`remedies`). Start
at `adapter.Adapter`, whose methods `memory/compare/trainer.py` explains.
"""
