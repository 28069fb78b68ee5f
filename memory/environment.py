"""The environment variables that this project reads and sets. Other modules read and change `os.environ` through it.

Functions with an argument `env` read this mapping (name -> value), by default the variables of this process.
`memory.devices.platform` decides with these functions how jax starts.
"""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

PLATFORMS, CPU_DEVICES, VISIBLE_GPUS = "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "CUDA_VISIBLE_DEVICES"
# Set by GitHub Actions: the file of the job summary, and the root of the repository.
GITHUB_SUMMARY, GITHUB_WORKSPACE = "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"


def variables(env: MutableMapping[str, str] | None = None) -> MutableMapping[str, str]:
    """Returns `env`, or the variables of this process. A change of the result changes the variables."""
    return os.environ if env is None else env


def text(name: str, env: Mapping[str, str] | None = None) -> str:
    """Returns the value of a variable; "" if it is not set."""
    return (os.environ if env is None else env).get(name, "")


def child_variables(changes: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for a child process: the variables of this process with `changes`."""
    return {**os.environ, **changes}


def set_defaults(values: Mapping[str, str]) -> None:
    """Sets the variables in `values` (name -> value) that are not set yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def run_on_cpu() -> None:
    """Makes jax use only the CPU. Must be called before jax is imported."""
    os.environ[PLATFORMS] = "cpu"


def xla_flags(env: Mapping[str, str] | None = None) -> str:
    """Returns the flags in XLA_FLAGS, separated by spaces."""
    return text("XLA_FLAGS", env)


def add_xla_flags(flags: str) -> None:
    """Adds flags, separated by spaces, to XLA_FLAGS. XLA reads the variable when its backend starts."""
    os.environ["XLA_FLAGS"] = f"{xla_flags()} {flags}".strip()


def visible_gpus(env: Mapping[str, str] | None = None) -> list[str]:
    """Returns the indices or UUIDs of the GPUs that CUDA_VISIBLE_DEVICES lists; [] if it lists none or is not set."""
    return [name.strip() for name in text(VISIBLE_GPUS, env).split(",") if name.strip()]


def hides_gpus(env: Mapping[str, str] | None = None) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES hides all GPUs: whether it is empty or -1."""
    return VISIBLE_GPUS in (os.environ if env is None else env) and text(VISIBLE_GPUS, env).strip() in ("", "-1")


def cache_home(env: Mapping[str, str] | None = None) -> Path:
    """Returns the folder for caches: $XDG_CACHE_HOME, or ~/.cache."""
    return Path(text("XDG_CACHE_HOME", env) or Path.home() / ".cache")
