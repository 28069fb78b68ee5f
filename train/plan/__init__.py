"""Where the trainer meets `bytescope.memory`: plans before the first step, and the memory that a run takes besides it.

In: a config, and devices or a target. Out: programs for `report` and `compare` (`config_factory`), a config with its
remat policy settled (`remat_auto`), the fastest configuration (`fit`), the front of least recomputation (`frontier`),
the levers one by one (`levers`), and what to do where memory does not suffice (`remedies`). Start at `config_factory`.
"""
