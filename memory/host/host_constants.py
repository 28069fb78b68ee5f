"""The constants of the host ledger that depend on the machine and the versions of libraries.

The shipped values can be replaced by values that `bytescope calibrate --host` measured on this machine (--rates=FILE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_json import is_number
from bytescope.memory.units import KIB, MIB


@dataclasses.dataclass(frozen=True)
class HostConstants:
    """Constants of the host ledger. The default values are the shipped ones, which `bytescope calibrate --host`
    measured with jax 0.10.2 and Python 3.11 on Linux in November 2026.

    Fields:
        jax_bytes: resident bytes of a process after it has imported jax and opened its CPU device.
        trainer_bytes: resident bytes that flax, optax and Orbax add.
        gpu_plugin_bytes: resident bytes that jax's CUDA plugin adds to a process that compiles for a GPU.
        cpu_compile_bytes, gpu_compile_bytes: bytes that XLA's compiler for CPUs or GPUs adds for any program.
        cpu_equation_bytes, gpu_equation_bytes: bytes that the compiler adds for each equation of a program's jaxpr.
        save_share: bytes that Orbax adds at most while it saves arrays, divided by the bytes of the arrays. The arrays
            are on the CPU.
        restore_share: bytes that Orbax adds at most while it restores arrays, which includes the restored arrays,
            divided by the bytes of the arrays.
    """

    jax_bytes: float = 165 * MIB
    trainer_bytes: float = 46 * MIB
    gpu_plugin_bytes: float = 80 * MIB
    cpu_compile_bytes: float = 53 * MIB
    gpu_compile_bytes: float = 96 * MIB
    cpu_equation_bytes: float = 12 * KIB
    gpu_equation_bytes: float = 37 * KIB
    save_share: float = 0.7
    restore_share: float = 1.3

    def replaced(self, measured: Mapping[str, Any]) -> HostConstants:
        """Returns the constants with those in `measured` (name of a field -> value) replaced. Raises ReportError for an
        unknown name, and for a value that is not a number of 0 or more."""
        names = [field.name for field in dataclasses.fields(self)]
        for name, value in measured.items():
            if name not in names:
                raise ReportError(
                    f"{name!r:.40} is an unknown constant of host memory: run bytescope calibrate --host again"
                )
            if not is_number(value) or value < 0:
                raise ReportError(
                    f"the host constant {name} is {value!r:.40}, but must be a number of 0 or more: run bytescope "
                    "calibrate --host again"
                )
        return dataclasses.replace(self, **measured)


SHIPPED = HostConstants()
# The constants of this process, as a list with one item.
_CURRENT = [SHIPPED]


def constants() -> HostConstants:
    """Returns the constants that this process uses: those of the file of --rates, if `bytescope calibrate --host` wrote
    it, otherwise the shipped ones."""
    return _CURRENT[0]


def use_constants(measured: Mapping[str, Any] | None) -> None:
    """Sets constants of this process: name of a field of `HostConstants` -> measured value. Other constants keep their
    shipped values. None or {} restores all shipped values.

    Raises ReportError if a name or a value is not valid.
    """
    _CURRENT[:] = [SHIPPED.replaced(measured or {})]
