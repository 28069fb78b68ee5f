"""What XLA's GPU compiler is told about collectives beside computation."""

import jaxlib

# Collectives of one turn of the loop over layers may start in the turn before. The first jaxlib (its version is the
# plugin's, and so the compiler's) that knows an option -> the name and value of it; newest first.
PIPELINED = {
    (0, 11): ("xla_gpu_pipeline_{}", "COLLECTIVE_PIPELINING_MODE_ON"),
    (0, 0): ("xla_gpu_enable_pipelined_{}", True),
}


def pipelined(version: str = jaxlib.__version__) -> dict[str, bool | str]:
    """Compiler options that pipeline collectives, for jaxlib `version` ("0.11.2").

    An option that a later compiler drops is an error of its own when it compiles.
    """
    known = tuple(int(part) for part in version.split(".")[:2])
    name, value = next(row for first, row in PIPELINED.items() if known >= first)
    return {name.format(kind): value for kind in ("all_gather", "reduce_scatter", "all_reduce")}
