"""Plans a config before its first step with `bytescope.memory`, and predicts the memory that a run needs outside the
step.

Input: a config, and devices or a target. Output: programs for `report` and `compare` (`config_factory`), a config
whose remat policy `auto` is replaced by a plan (`remat_auto`), the fastest configuration that fits (`fit`), the least
recomputation for each memory budget (`frontier`), one memory saving after the other (`levers`), the facts of a step
that `memory` reads (`config_facts`), the flags that remedy a finding (`report_remedies`), and advice for a step that
does not fit (`advice`). Start at `config_factory`.
"""
