"""What XLA's compiler is told besides the program: the group `xla` of the config, one row per value.

Options go to the compiler with the program itself (`Program.compiler_options`), so that what is analysed is what runs;
XLA_FLAGS of the environment apply where no key is set. Every option below exists in jaxlib 0.10 to 0.12. A later
compiler that has dropped one refuses it when it compiles.
"""

import contextlib
from collections.abc import Iterator, Mapping

import jax
import jaxlib
from jax.sharding import Mesh

from bytescope.memory.errors import remedy_for

Options = dict[str, bool | int | str]

# What XLA puts into command buffers (CUDA graphs) by default, in all these versions; "loops" adds the loop over layers,
# which is then one launch.
_BUFFERED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"

# key of the group -> value -> options. Levels by number (jax.config's O0 to O3): jax 0.10 takes no names here.
TABLE: Mapping[str, Mapping[str, Options]] = {
    "optimization_level": {f"O{level}": {"optimization_level": 10 * level + 9} for level in range(4)},
    "latency_hiding": {
        "on": {"xla_gpu_enable_latency_hiding_scheduler": True},
        "off": {"xla_gpu_enable_latency_hiding_scheduler": False},
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
# Collectives of one turn of the loop over layers may start in the turn before. The first jaxlib that knows an option
# (its version is the plugin's, and so the compiler's) -> the name and value of the option; newest first.
PIPELINED: Mapping[tuple[int, int], tuple[str, bool | str]] = {
    (0, 11): ("xla_gpu_pipeline_{}", "COLLECTIVE_PIPELINING_MODE_ON"),
    (0, 0): ("xla_gpu_enable_pipelined_{}", True),
}
GPUS = ("gpu", "cuda")  # platforms of present devices, and of described ones


def pipelined(version: str = jaxlib.__version__) -> Options:
    """Compiler options that pipeline collectives over the turns of a loop, for jaxlib `version` ("0.11.2")."""
    known = tuple(int(part) for part in version.split(".")[:2])
    name, value = next(row for first, row in PIPELINED.items() if known >= first)
    return {name.format(kind): value for kind in ("all_gather", "reduce_scatter", "all_reduce")}


def compiler_options(xla: Mapping[str, str], prefetch: int, platform: str) -> Options:
    """Returns the XLA compiler options of `platform`, option name -> value.

    xla: the config group `xla`; each key has the name of a row of TABLE, or "" for the compiler's own default.
    prefetch: the config key `mesh.prefetch`.

    Raises:
      ValueError: a value that is not in TABLE, or any value if `platform` is not a GPU; the message has the remedy.
    """
    options: Options = pipelined() if platform in GPUS and prefetch else {}
    for key, rows in TABLE.items():
        value = xla[key]
        if value == "":
            continue
        if value not in rows:
            raise ValueError(f"xla.{key}={value!r}: {remedy_for(value, rows)}, or leave it empty for XLA's default")
        if platform not in GPUS:
            raise ValueError(
                f"xla.{key}={value} is for XLA's GPU compiler, and the platform is {platform}: leave it empty"
            )
        options |= rows[value]
    return options


@contextlib.contextmanager
def xla_remat_pass(enabled: bool) -> Iterator[None]:
    """A context in which XLA compiles with or without its own rematerialization pass (`remat.xla_pass`)."""
    before = jax.config.jax_compiler_enable_remat_pass  # type: ignore[attr-defined]  # jax makes it at run time
    jax.config.update("jax_compiler_enable_remat_pass", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_compiler_enable_remat_pass", before)


def for_pallas(mesh: Mesh) -> contextlib.AbstractContextManager:
    """A context that says which GPU Pallas' kernels are for: from jax 0.11 on it asks, and a described one it does not
    find by itself."""
    kind = mesh.abstract_mesh.abstract_device
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind))
