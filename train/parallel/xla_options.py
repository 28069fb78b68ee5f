"""Options of XLA's compiler: the group `xla` of the config.

TABLE has one row per value of a key, PARSED a function per key whose value is a number or a list. Options are passed to
the compiler with the program (`Program.compiler_options`), so that the analyzed program equals the program that runs.
XLA_FLAGS of the environment apply if no key is set. Every option below exists in jaxlib 0.10 to 0.12. A later compiler
without an option refuses the option when it compiles.
"""

import contextlib
from collections.abc import Callable, Mapping

import jax
import jaxlib
from jax.sharding import Mesh

from bytescope.memory.devices.compiler import DISABLED_PASSES, REMAT_PASS, SCHEDULER_PASS, SLOP, jax_setting
from bytescope.memory.devices.xla_flags import FENCE, FENCE_SINCE, Options, parse_flags
from bytescope.memory.errors import ReportError
from bytescope.memory.units import parse_bytes

# The operations that XLA puts into command buffers (CUDA graphs) by default in all these versions. "loops" adds the
# loop over layers, which is then one launch.
_BUFFERED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"

# Key of the group -> value -> options. Levels are numbers (O0 to O3 of jax.config), because jax 0.10 accepts no names.
TABLE: Mapping[str, Mapping[str, Options]] = {
    "optimization_level": {f"O{level}": {"optimization_level": 10 * level + 9} for level in range(4)},
    "latency_hiding": {
        "on": {"xla_gpu_enable_latency_hiding_scheduler": True},
        # jaxlib 0.10 schedules for latency with the first option alone, 0.12 does not.
        "off": {"xla_gpu_enable_latency_hiding_scheduler": False, DISABLED_PASSES: SCHEDULER_PASS},
    },
    "command_buffers": {
        "off": {"xla_gpu_enable_command_buffer": ""},
        "kernels": {"xla_gpu_enable_command_buffer": "FUSION"},
        "loops": {"xla_gpu_enable_command_buffer": f"{_BUFFERED},WHILE"},
    },
    "gemm": {
        "cublas": {"xla_gpu_enable_triton_gemm": False},
        "triton": {"xla_gpu_cublas_fallback": False, "xla_gpu_triton_gemm_any": True},
    },
    "autotune_level": {str(level): {"xla_gpu_autotune_level": level} for level in range(5)},
}
# The largest valid xla.memory_slop in percent. Above 100, XLA plans with more memory than the device has.
MAX_SLOP = 200


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _memory_slop(text: str) -> Options:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_SLOP:
        raise ValueError(
            f"xla.memory_slop={text} is not a percentage: give a whole number from 1 to {MAX_SLOP}, or leave it empty "
            "for XLA's 95"
        )
    return {SLOP: int(text)}


def _memory_fence(text: str) -> Options:
    if _version(jaxlib.__version__) < FENCE_SINCE:
        raise ValueError(
            f"xla.memory_fence={text} needs jaxlib {'.'.join(map(str, FENCE_SINCE))} or newer, and this is jaxlib "
            f"{jaxlib.__version__}: leave it empty"
        )
    try:
        return {FENCE: parse_bytes(text)}
    except ReportError as error:
        raise ValueError(f"xla.memory_fence: {error}") from error


# Key of the group -> function from its text to options.
PARSED: Mapping[str, Callable[[str], Options]] = {
    "memory_slop": _memory_slop,
    "memory_fence": _memory_fence,
    "flags": lambda text: parse_flags(text.split(), "xla.flags="),
}
# Options by which collectives of one iteration of the loop over layers may start in the previous iteration. The first
# jaxlib version that knows an option (also the version of its compiler) -> name and value of the option; newest first.
PIPELINED: Mapping[tuple[int, int], tuple[str, bool | str]] = {
    (0, 11): ("xla_gpu_pipeline_{}", "COLLECTIVE_PIPELINING_MODE_ON"),
    (0, 0): ("xla_gpu_enable_pipelined_{}", True),
}
GPUS = ("gpu", "cuda")  # platform names of present devices, and of described devices


def pipelined(version: str = jaxlib.__version__) -> Options:
    """Returns the compiler options, name -> value, with which XLA runs the collectives of one loop iteration while
    another iteration computes.

    `version`: the version of jaxlib, such as "0.11.2".
    """
    known = _version(version)
    name, value = next(row for first, row in PIPELINED.items() if known >= first)
    return {name.format(kind): value for kind in ("all_gather", "reduce_scatter", "all_reduce")}


def compiler_options(xla: Mapping[str, str], prefetch: int, platform: str, xla_pass: bool = True) -> Options:
    """Returns XLA compiler options, option name -> value, for a config on a platform.

    Args:
      xla: the config group `xla`. Each value is the name of a row of TABLE or a text for a function of PARSED; "" for
        the compiler's default.
      prefetch: the config key `mesh.prefetch`, the number of layers whose parameters are gathered in advance.
      platform: the platform name of the devices, such as "gpu".
      xla_pass: the config key `remat.xla_pass`. An option that switches passes off replaces what jax sets for False, so
        it switches XLA's rematerialization pass off too.

    Raises:
      ValueError: a value for a function of PARSED is not valid, or a value is set although `platform` is not a GPU. The
        message has the remedy.
    """
    options: Options = pipelined() if platform in GPUS and prefetch else {}
    disabled: list[str] = []
    for key in (*TABLE, *PARSED):
        value = xla[key]
        if value == "":
            continue
        added = TABLE[key][value] if key in TABLE else PARSED[key](value)
        if platform not in GPUS and key != "flags":
            raise ValueError(
                f"xla.{key}={value} is for XLA's GPU compiler, but the platform is {platform}: leave it empty"
            )
        options |= added
        disabled += filter(None, str(added.get(DISABLED_PASSES, "")).split(","))
    if disabled:
        options[DISABLED_PASSES] = ",".join(disabled)
    if DISABLED_PASSES in options and not xla_pass:
        options[DISABLED_PASSES] = f"{options[DISABLED_PASSES]},{REMAT_PASS}"
    return options


def xla_remat_pass(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which XLA compiles with or without its own rematerialization pass
    (`remat.xla_pass`), in this thread only."""
    return jax_setting("jax_compiler_enable_remat_pass", enabled)


def for_pallas(mesh: Mesh) -> contextlib.AbstractContextManager:
    """Returns a context manager that tells Pallas which GPU to compile kernels for.

    Pallas requires it from jax 0.11 on, because it cannot detect a GPU that is only described and not present.
    """
    kind = mesh.abstract_mesh.abstract_device
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind))
