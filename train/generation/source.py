"""What a model is generated from: a run directory of ours, or a folder as Hugging Face has them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.train.data.tokenizer import open_tokenizer
from bytescope.train.errors import UserError
from bytescope.train.export.saved_run import SavedRun
from bytescope.train.export.tensors import Parameters
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.load import load_params

# Kernels of experts that multiply the rows of every token: those with room for some would drop others by what else is
# in the batch.
EXPERTS = {"capacity": "auto"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to generate from.

    Fields:
      name: as the command line has it. config: layers on their own, so that no step copies one out of a stack.
      graph: of the Transformer. load: puts the parameters in the compute dtype on a device. tokenizer: of its text.
      ends: ids that end an answer.
    """

    name: str
    config: ModelConfig
    graph: nnx.GraphDef
    shapes: Any
    load: Callable[[jax.Device], Any]
    tokenizer: Any
    ends: frozenset[int]
