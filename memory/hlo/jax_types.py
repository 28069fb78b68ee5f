"""The types of jax's devices and stages, for annotations: importing this module does not import jax.

Other libraries wrap jax's stages in classes of their own, which have the same attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Device as JaxDevice
    from jax.stages import Compiled as CompiledStage
    from jax.stages import Lowered as LoweredStage
    from jax.stages import Traced as TracedStage
else:
    JaxDevice = CompiledStage = LoweredStage = TracedStage = object

__all__ = ["CompiledStage", "JaxDevice", "LoweredStage", "TracedStage"]
