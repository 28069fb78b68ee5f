"""The third-party packages of the extra `train`. The trainer's commands need them; reports on other programs do not."""

import importlib.util

from bytescope.memory.errors import install_remedy

# Import names of the packages in the extra `train` of pyproject.toml.
PACKAGES = (
    "flax",
    "optax",
    "orbax",
    "tensorstore",
    "ml_collections",
    "grain",
    "tokenizers",
    "safetensors",
)


def are_installed() -> bool:
    """Returns whether all packages of the extra `train` can be imported. Imports none of them."""
    return all(importlib.util.find_spec(name) for name in PACKAGES)


def needs_trainer(error: ModuleNotFoundError) -> bool:
    """Returns whether an import failed because a package of the extra `train` is not installed."""
    return error.name is not None and error.name.partition(".")[0] in PACKAGES


def message(subject: str) -> str:
    """Returns the error message for `subject`, such as "bytescope compare --levers", which needs the extra `train`."""
    return f"{subject} needs the trainer's packages: {install_remedy('train')}"
