"""The weights that a run begins from: checked before anything is compiled, loaded once, never when it resumes."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from bytescope.memory.view.progress_bar import progress
from bytescope.model.quantized.weight import quantized_weights
from bytescope.train.program.program import Program
from bytescope.train.weights.adapter_folder import adapter_leaves
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import Leaf, checkpoint_leaves
from bytescope.train.weights.load import load_leaves, load_params


def fingerprint_of_weights(program: Program) -> str:
    """The fingerprint of `init.folder`, "" without one. Raises UserError unless it holds all of the model's tensors."""
    if not program.config.init.folder:
        return ""
    folder = Folder.open(program.config.init.folder)
    checkpoint_leaves(folder, program.model)
    return folder.fingerprint


def fingerprint_of_adapter(program: Program) -> str:
    """The fingerprint of `init.adapter`, "" without one. Raises UserError unless it holds all of the run's adapters."""
    leaves = _adapter_leaves(program)
    return next(iter(leaves.values())).folder.fingerprint if leaves else ""


def initial_adapters(program: Program) -> Any:
    """The adapters that `init.adapter` holds, in their shardings and dtypes; None without one."""
    leaves = _adapter_leaves(program)
    return load_leaves(leaves, program.model, program.state.params, order=program.order) if leaves else None


def _adapter_leaves(program: Program) -> dict[str, Leaf]:
    """Where the adapters of `init.adapter` are; empty without one."""
    init, lora = program.config.init, program.config.lora
    if not init.adapter:
        return {}
    return adapter_leaves(
        Folder.open_adapter(init.adapter), program.model, Folder.open(init.folder), lora.rank, lora.targets
    )


def initial_params(program: Program, console: Console) -> Any:
    """The parameters that `init.folder` holds, in their shardings and dtypes; None without one. Adapters are not among
    them."""
    if not program.config.init.folder:
        return None
    return _loaded(program, program.state.frozen if program.lora else program.state.model_params, console)


def frozen_params(program: Program, console: Console) -> Any:
    """The frozen parameters as they were when the run began, in their shardings and dtypes; None where all are
    trained."""
    if not program.config.init.folder:
        return program.init_frozen()
    return program.state.frozen and _loaded(program, program.state.frozen, console)


def _loaded(program: Program, shapes: Any, console: Console) -> Any:
    with progress(None, "loading weights", "bytes", console) as bar:
        return load_params(
            Folder.open(program.config.init.folder),
            program.model,
            shapes,
            bar.show,
            quantized_weights(program.abstract()),
            program.order,
        )
