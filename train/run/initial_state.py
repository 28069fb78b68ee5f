"""The state at the start of a run: the newest checkpoint, or weights and adapters from folders, or random initial
values.

Folders are checked before anything is compiled, and loaded once. A resumed run loads only its frozen parameters from
them, because checkpoints do not contain frozen parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from bytescope.memory.host.process_memory import host_phase
from bytescope.memory.report.host_notice import expect_host, resident_term, warn_if_too_large
from bytescope.memory.view.progress_bar import progress
from bytescope.model.frozen import merge_parameters, router_biases, split_parameters
from bytescope.model.quantized.weight import quantized_weights
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.program.program import Program
from bytescope.train.step.state import TrainState
from bytescope.train.weights.adapter_folder import adapter_leaves
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import Leaf, checkpoint_leaves
from bytescope.train.weights.load import host_terms, load_leaves, load_params


def start_state(program: Program, checkpoints: Checkpoints, console: Console) -> tuple[TrainState, Position]:
    """Returns the training state and the position (updates done, sequences consumed) of the newest undamaged
    checkpoint, or the initial state if there is none.

    Frozen parameters are not in checkpoints and are loaded again from their original source. Only router biases are
    restored from the checkpoint, because updates change them.
    """
    restored = checkpoints.restore(
        program.state, lambda text: console.print(f"warning: {text}", soft_wrap=True), program.order
    )
    if restored is None:
        return _make_initial_state(program, console), Position(0, 0)
    state, position = restored
    console.print(f"resumed at step {position.step}")
    frozen = frozen_params(program, console)
    if state.frozen is not None:
        frozen = merge_parameters(split_parameters(frozen, router_biases(frozen))[0], state.frozen)
    return dataclasses.replace(state, frozen=frozen), position


def _make_initial_state(program: Program, console: Console) -> TrainState:
    params = initial_params(program, console)
    state = program.init() if params is None else program.init_around(params)
    adapters = initial_adapters(program)
    if adapters is None:
        return state
    return dataclasses.replace(state, params=adapters)  # no optimizer's initial state depends on parameter values


def fingerprint_of_weights(program: Program) -> str:
    """Returns the fingerprint (a hash) of the weights in the folder `init.folder`; "" if the key is not set.

    Raises UserError unless the folder has all tensors of the model.
    """
    if not program.config.init.folder:
        return ""
    folder = Folder.open(program.config.init.folder)
    checkpoint_leaves(folder, program.model)
    return folder.fingerprint


def fingerprint_of_adapter(program: Program) -> str:
    """Returns the fingerprint (a hash) of the LoRA adapters in the folder `init.adapter`; "" if the key is not set.

    Raises UserError unless the folder has all adapters that the run trains.
    """
    leaves = _read_adapter_leaves(program)
    return next(iter(leaves.values())).folder.fingerprint if leaves else ""


def initial_adapters(program: Program) -> Any:
    """Loads the LoRA adapters in the folder `init.adapter`. Returns a tree of arrays with the program's shardings and
    dtypes, or None if the key is not set."""
    leaves = _read_adapter_leaves(program)
    return load_leaves(leaves, program.model, program.state.params, order=program.order) if leaves else None


def _read_adapter_leaves(program: Program) -> dict[str, Leaf]:
    init, lora = program.config.init, program.config.lora
    if not init.adapter:
        return {}
    return adapter_leaves(
        Folder.open_adapter(init.adapter), program.model, Folder.open(init.folder), lora.rank, lora.targets
    )


def initial_params(program: Program, console: Console) -> Any:
    """Loads the weights in the folder `init.folder`. Returns the tree of parameters, without adapters, with the
    program's shardings and dtypes, or None if the key is not set."""
    if not program.config.init.folder:
        return None
    return _loaded(program, program.state.frozen if program.lora else program.state.model_params, console)


def frozen_params(program: Program, console: Console) -> Any:
    """Returns the tree of frozen parameters with their values at the start of the run, and with the program's shardings
    and dtypes. Returns None if all parameters are trained."""
    if not program.config.init.folder:
        return program.init_frozen()
    return program.state.frozen and _loaded(program, program.state.frozen, console)


def _loaded(program: Program, shapes: Any, console: Console) -> Any:
    host = expect_host([resident_term("load"), *host_terms(shapes)])
    warn_if_too_large(host, "set --config.precision.param=bfloat16, or train in more processes on other nodes")
    with host_phase("load"), progress(None, "loading weights", "bytes", console) as bar:
        return load_params(
            Folder.open(program.config.init.folder),
            program.model,
            shapes,
            bar.show,
            quantized_weights(program.abstract()),
            program.order,
        )
