"""Records of how XLA:GPU's compiler passes changed a program: the memory limit that they plan with, the values that
they compute again, and the buffers that the scheduler keeps alive. All sizes are bytes on one device."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class XlaBudget:
    """The memory limit that XLA:GPU plans with while it compiles a program. All fields are None for other platforms and
    for programs that were not compiled in this process.

    Fields:
        base_bytes: bytes of device memory that XLA assumes: the size of jax's pool, or 80 % of the GPU's memory.
        io_bytes: bytes of arguments and results, without results that reuse the memory of an argument.
        slop_percent: percentage of the other bytes (`base_bytes - io_bytes`) that temporary values may use.
        limit_bytes: bytes that XLA allows for temporary values: (base_bytes - io_bytes) x slop_percent / 100; 0 if
            `io_bytes` is larger than `base_bytes`.
        need_bytes: bytes of temporary values and results. XLA's rematerialization pass compares them with `limit_bytes`
            plus the results. The pass counts values before they share memory, so its own count may be larger; its
            count is used if XLA logged it.
        margin_bytes: `limit_bytes` plus the results, minus `need_bytes`: the bytes by which the program is below XLA's
            limit; negative if it is above.
        unreduced_bytes: bytes of temporary values and results before the rematerialization pass. XLA logs them only if
            the pass cannot bring the program below the limit; None otherwise.
        scheduler_bytes: bytes by which the peak in XLA's schedule exceeds the lowest peak that `peak.memory_order`
            found in another order of the instructions; None if unknown.
        disabled_passes: names of the compiler passes that were switched off.
    """

    base_bytes: int | None = None
    io_bytes: int | None = None
    slop_percent: int | None = None
    limit_bytes: int | None = None
    need_bytes: int | None = None
    margin_bytes: int | None = None
    unreduced_bytes: int | None = None
    scheduler_bytes: int | None = None
    disabled_passes: tuple[str, ...] = ()

    @property
    def margin_share(self) -> float:
        """`margin_bytes` as a fraction of the bytes that XLA allows for temporary values and results: the unused
        fraction, negative if the program needs more than XLA allows. 0.0 if the allowed bytes are 0 or unknown."""
        allowed = (self.need_bytes or 0) + (self.margin_bytes or 0)
        return (self.margin_bytes or 0) / allowed if allowed > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class RecomputedValue:
    """An instruction that XLA's rematerialization pass added, to compute a value again instead of keeping it.

    Fields:
        name: name of the instruction, such as "fusion.3.remat2".
        op_name: JAX's name of the operation that is computed again.
        source: "file.py:line" of the operation in the user's code; "" if unknown.
        bytes: size of the value. Its memory is free until the value is computed again.
        flops: FLOPs of the instruction's matrix products in one call of the step; 0 if it contains none.
        times: number of times that the instruction runs in one call of the step.
    """

    name: str
    op_name: str
    source: str
    bytes: int
    flops: int
    times: int = 1


@dataclasses.dataclass(frozen=True)
class HeldBuffer:
    """A buffer that is alive at the peak in XLA's schedule, but would not be in the order with the lowest peak that
    `peak.memory_order` found.

    Fields:
        name: name of the instruction that computes the value in the buffer.
        bytes: size of the buffer.
        shape: dimensions of the array in the buffer, on one device.
        dtype: dtype of the array, as in HLO.
        op_name: JAX's name of the operation that computes the value.
        source: "file.py:line" of this operation, "" if unknown.
        reader: name of the instruction that reads the value after the peak and could run earlier; "" if instead the
            value is computed earlier than necessary.
        reader_op_name, reader_source: JAX's name of the operation in `reader`, and its source line.
        parameter: path of the parameter whose gradient the reader computes; "" if it computes something else.
        weight_gradient: whether the reader is a matrix product that computes the gradient of a parameter.
    """

    name: str
    bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    op_name: str = ""
    source: str = ""
    reader: str = ""
    reader_op_name: str = ""
    reader_source: str = ""
    parameter: str = ""
    weight_gradient: bool = False
