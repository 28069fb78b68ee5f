"""Leaves out the machine code of kernels when a program is compiled for NVIDIA GPUs that are not present.

Nobody runs this code, and a report reads nothing of it: XLA writes the HloProto with its buffers before it emits the
first kernel, and states 0 bytes of code for a GPU that is not present. Without this module, kernels take three quarters
of the compiler's time. XLA optimizes each kernel with LLVM and starts NVIDIA's assembler (ptxas) for each, a hundred
times and more for a training step. The compiler options of this module

- replace the assembler by a script that writes an almost empty file,
- switch LLVM's optimizations off,
- let XLA keep emitted kernels in a file, so that a kernel which another program has too is emitted once.

If a compile with these options fails, it is repeated without them, so that error messages are XLA's own. An error that
only the assembler would find (a kernel with too much shared memory, for example) is not found.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescope.memory import environment
from bytescope.memory.files import cache_folder
from bytescope.memory.hlo.jax_types import JaxDevice

# Options of XLA (xla.proto). With a kernel file, XLA looks a kernel up by its fused computation. It reads the file
# before it emits kernels, and replaces the file by one with the new kernels (kernel_reuse_cache.cc).
CUDA_FOLDER, KERNEL_FILE = "xla_gpu_cuda_data_dir", "xla_gpu_kernel_cache_file"
_OTHER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_gpu_enable_llvm_module_compilation_parallelism": True}
# XLA reads and writes the whole file at each compile. A training step adds about 100 KB.
_MAX_KERNEL_FILE_BYTES = 32 * 2**20

# XLA starts the assembler as `ptxas INPUT -o OUTPUT ...`, and as `ptxas --version`.
_SCRIPT = """#!/bin/sh
[ "$2" = -o ] || exec {assembler} "$@"
echo none > "$3"
"""


def options_without(device: JaxDevice) -> Mapping[str, Any]:
    """Returns the compiler options that leave out machine code, flag of XLA -> value. Returns {} if the device is not a
    described NVIDIA GPU, if no assembler is found that could be replaced, or if the cache folder cannot be written.

    device: a device that the program is compiled for; it is not present.
    """
    from bytescope.memory.devices.targets import platform_of

    if platform_of(device) != "cuda":
        return {}
    from jax._src.lib import cuda_path  # the folder that jax passes to XLA; no public API has it

    cuda = _cuda_without_assembler(Path(cuda_path), cache_folder("kernels")) if cuda_path else None
    if cuda is None or CUDA_FOLDER in environment.xla_flags():  # the user chose a folder
        return {}
    return {CUDA_FOLDER: str(cuda), KERNEL_FILE: str(_kernel_file(device.device_kind)), **_OTHER_OPTIONS}


def remove_kernels(options: Mapping[str, Any]) -> None:
    """Removes the file of emitted kernels, which may be damaged. `options`: the result of `options_without`."""
    with contextlib.suppress(OSError):
        Path(options[KERNEL_FILE]).unlink()


def _kernel_file(kind: str) -> Path:
    """Returns the file of emitted kernels for a kind of GPU and the installed compiler. A file that has become too
    large is removed. `kind`: the GPU's name in jax (device_kind)."""
    import jaxlib

    path = cache_folder("kernels") / re.sub(r"\W+", "-", f"{kind} jaxlib {jaxlib.__version__}")
    with contextlib.suppress(OSError):
        if path.stat().st_size > _MAX_KERNEL_FILE_BYTES:
            path.unlink()
    return path


@functools.cache
def _cuda_without_assembler(cuda: Path, cache: Path) -> Path | None:
    """Returns a folder with links to everything in a CUDA folder, except that a script stands in for the assembler. The
    folder is made once and kept in the cache. Returns None if it cannot be made or if its script does not run.

    cuda: the CUDA folder, which contains bin/ptxas. cache: the folder of the cache.
    """
    assembler = cuda / "bin" / "ptxas"
    script = _SCRIPT.format(assembler=shlex.quote(str(assembler)))
    name = hashlib.sha256(script.encode()).hexdigest()[:16]
    place = cache / f"cuda-{name}"
    if not place.exists():
        if not assembler.exists():
            return None
        try:
            cache.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=cache, prefix=".cuda-"))
        except OSError:
            return None
        try:
            (partial / "bin").mkdir()
            for path in [*cuda.glob("*"), *cuda.glob("bin/*")]:
                if path not in (cuda / "bin", assembler):
                    (partial / path.relative_to(cuda)).symlink_to(path)
            (partial / "bin" / "ptxas").write_text(script)
            (partial / "bin" / "ptxas").chmod(0o755)
            partial.rename(place)
        except OSError:  # another process was faster, or the disk is full
            shutil.rmtree(partial, ignore_errors=True)
    try:
        subprocess.run([place / "bin" / "ptxas", "--version"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):  # a disk without executable files, or CUDA has been removed
        return None
    return place
