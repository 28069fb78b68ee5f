"""Where the trainer meets `bytescope.memory`: plans before the first step, and the memory that a run takes besides it.

In: a config, and devices or a target. Out: programs for `report` and `compare` (`config_factory`), a config with its
remat policy settled (`remat_auto`), the fastest configuration (`fit`), the front of least recomputation (`frontier`),
the levers one by one (`levers`), the facts of a step that `memory` reads (`model_facts`), the flags of a finding's
remedy (`report_remedies`), and what to do if memory does not suffice (`advice`, `remedies`). Start at `config_factory`.
"""
