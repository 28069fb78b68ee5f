"""Where the trainer meets `bytescope.memory`: plans before the first step, and the memory that a run takes besides it.

In: a config, and devices or a target. Out: what commands and workers of `memory` ask a trainer (`adapter`), a config
with `remat.policy=auto` settled (`remat_auto`), the configuration of `train --fit` (`fit`), and the bytes of a run
outside the step (`run_peak`). Start at `adapter.Adapter`, whose methods `memory/plan/trainer.py` explains.
"""
