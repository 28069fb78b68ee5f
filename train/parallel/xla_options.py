"""What XLA's compiler is told besides the program: the group `xla` of the config, a row a value.

An option goes to the compiler with the very program (`Program.compiler_options`), so that what is analysed is what
runs; XLA_FLAGS of the environment hold for what no key names. Every option below exists in jaxlib 0.10 to 0.12; one
that a later compiler drops is an error of its own when it compiles.
"""

import contextlib
from collections.abc import Iterator, Mapping

import jax
from ml_collections import ConfigDict

from bytescope.train.parallel.xla_overlap import pipelined

Options = dict[str, bool | int | str]

# What XLA puts into command buffers (CUDA graphs) by itself, in all its versions at hand; "loops" adds the loop over
# layers, which is then one launch.
_BUFFERED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"

# key of the group -> value -> options. Levels by number (jax.config's O0 to O3): jax 0.10 takes no names here.
TABLE: Mapping[str, Mapping[str, Options]] = {
    "optimization_level": {f"O{level}": {"optimization_level": 10 * level + 9} for level in range(4)},
    "latency_hiding": {"on": {"xla_gpu_enable_latency_hiding_scheduler": True},
                       "off": {"xla_gpu_enable_latency_hiding_scheduler": False}},
    "command_buffers": {"off": {"xla_gpu_enable_command_buffer": ""},
                        "kernels": {"xla_gpu_enable_command_buffer": "FUSION"},
                        "loops": {"xla_gpu_enable_command_buffer": f"{_BUFFERED},WHILE"}},
    "gemm": {"cublas": {"xla_gpu_enable_triton_gemm": False},
             "triton": {"xla_gpu_cublas_fallback": False, "xla_gpu_triton_gemm_any": True}},
    "autotune_level": {str(level): {"xla_gpu_autotune_level": level} for level in range(5)},
}
GPUS = ("gpu", "cuda")  # platforms of devices that are here, and of described ones


def compiler_options(config: ConfigDict, platform: str) -> Options:
    """Options for the compiler of `platform`: those of the group `xla`, and of `mesh.prefetch`.

    Raises:
      ValueError: a value that is no row, or one for another compiler than the GPU's, with the remedy.
    """
    options: Options = pipelined() if platform in GPUS and config.mesh.prefetch else {}
    for key, rows in TABLE.items():
        value = config.xla[key]
        if value == "":
            continue
        if value not in rows:
            raise ValueError(f"xla.{key}={value!r}: choose one of {', '.join(rows)}, or leave it empty for XLA's own")
        if platform not in GPUS:
            raise ValueError(f"xla.{key}={value} is for XLA's GPU compiler, and this is {platform}: leave it empty")
        options |= rows[value]
    return options


@contextlib.contextmanager
def xla_remat_pass(enabled: bool) -> Iterator[None]:
    """XLA's own rematerialization pass on or off for the compiles inside."""
    before = jax.config.jax_compiler_enable_remat_pass
    jax.config.update("jax_compiler_enable_remat_pass", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_compiler_enable_remat_pass", before)
