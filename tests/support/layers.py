"""The layers of the packages: which module may import which. The only declaration; tests/test_rooms.py enforces it.

A room is a sub-package directly under a package, or a module at the top of a package.
"""

# Package -> packages that its modules may import.
PACKAGES = {
    "configs": {"configs"},
    "model": {"model"},
    "memory": {"memory"},
    "train": {"configs", "memory", "model", "train"},
}
# Rooms from the lowest layer up; a room imports only rooms of the layers below its own, also inside functions and for
# type checkers.
LAYERS = {
    "model": (
        ("model.names", "model.placement", "model.precision", "model.model_config", "model.rotary", "model.zigzag"),
        ("model.fp8", "model.quantized", "model.remat", "model.segments"),
        ("model.layers",),
        ("model.adapters", "model.experts", "model.norm"),
        ("model.attention", "model.mlp", "model.runs"),
        ("model.block",),
        ("model.transformer",),
        ("model.frozen", "model.paged"),
        ("model",),
    ),
    "memory": (
        ("memory.environment",),
        ("memory.errors", "memory.units", "memory.files", "memory.jaxprs"),
        ("memory.processes",),
        ("memory.records",),
        ("memory.hlo", "memory.formulas"),
        ("memory.host",),
        ("memory.devices",),
        ("memory.allocators",),
        ("memory.program",),
        ("memory.peak",),
        ("memory.cost",),
        ("memory.seconds",),
        ("memory.remat", "memory.findings"),
        ("memory.audit",),
        ("memory.analysis",),
        ("memory.view",),
        ("memory.messages",),
        ("memory.report",),
        ("memory.watching", "memory.profile"),
        ("memory.compare",),
        ("memory.adapters",),
        ("memory.subjects",),
        ("memory",),
        ("memory.pytest_guard",),
        ("memory.commands",),
        ("memory.cli",),
        ("memory.__main__",),
    ),
    # `source` recognizes runs, folders of weights and configs. It is low, because program/ finds configs with it, and
    # weights/ and checkpoints/ take the names of their files from it. `launch` is low, because checkpoints wait for
    # other processes. `weights` is low, because program/ reads the config of a folder of weights. `export` and
    # `quantize` are rooms of their own: export reads checkpoints, generate reads adapters through export, and quantize
    # measures text with generate.
    "train": (
        ("train.user_errors", "train.config_fields"),
        ("train.source",),
        ("train.launch", "train.data", "train.parallel"),
        ("train.weights", "train.step"),
        ("train.pipeline",),
        ("train.program",),
        ("train.checkpoints",),
        ("train.export",),
        ("train.generate",),
        ("train.quantize", "train.plan"),
        ("train.run",),
        ("train.commands",),
        ("train",),
    ),
}
# (importer, imported) -> why this import is allowed against the tables above.
EXCEPTIONS = {
    ("memory.units", "memory.errors"): "sizes that a user misspelled are user errors",
}


def declared() -> set[str]:
    """Every room that a layer names."""
    return {room for layers in LAYERS.values() for layer in layers for room in layer}


def may_import(importer: str, imported: str) -> bool | None:
    """Whether one module may import the other; None if a room of theirs is in no layer."""
    if (importer, imported) in EXCEPTIONS:
        return True
    package, other = importer.split(".")[0], imported.split(".")[0]
    if package not in PACKAGES or other not in PACKAGES:
        return None
    if package != other:
        return other in PACKAGES[package]
    room, other_room = (".".join(name.split(".")[:2]) for name in (importer, imported))
    if room == other_room or package not in LAYERS:
        return True
    numbers = {each: number for number, layer in enumerate(LAYERS[package]) for each in layer}
    if room not in numbers or other_room not in numbers:
        return None
    return numbers[other_room] < numbers[room]
