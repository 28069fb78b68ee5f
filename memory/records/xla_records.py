"""Records of what XLA:GPU's passes did to a program: its memory budget, the values that it recomputes, and the buffers
that its scheduler keeps alive. All sizes are bytes on one device."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class XlaBudget:
    """The memory that XLA:GPU plans with when it schedules a program. All fields are None for other platforms and for
    programs that were compiled elsewhere.

    Fields:
        base_bytes: bytes of device memory that XLA assumes: the size of jax's pool, or 80 % of the GPU's memory.
        io_bytes: bytes of arguments and results, without results that reuse the memory of an argument.
        slop_percent: percentage of the remaining bytes (base - io) that temporary values may use.
        limit_bytes: bytes of temporary values that XLA allows: (base - io) x slop / 100; 0 if `io_bytes` exceed the
            base.
        need_bytes: bytes of temporary values and results. XLA's rematerialization pass compares them with `limit_bytes`
            plus the results. The pass counts values before they share memory, so its own count may be larger; that
            count is used if XLA logged it.
        margin_bytes: bytes by which the program is below this limit; negative if it is above.
        unreduced_bytes: bytes of temporary values and results before the rematerialization pass. XLA logs them only if
            the pass does not reach its limit; None otherwise.
        scheduler_bytes: bytes by which the peak in XLA's schedule exceeds the peak in an order of least memory, by the
            estimate of `peak.memory_order`; None if unknown.
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
        """The margin as a fraction of the bytes that XLA allows for temporary values and results; 0.0 if these are 0 or
        unknown."""
        allowed = (self.need_bytes or 0) + (self.margin_bytes or 0)
        return (self.margin_bytes or 0) / allowed if allowed > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class RecomputedValue:
    """An instruction that XLA's rematerialization pass added, to compute a value again instead of keeping it.

    Fields:
        name: name of the instruction, such as "fusion.3.remat2".
        op_name: JAX's name of the operation.
        source: "file.py:line" of the user's code, "" if unknown.
        bytes: size of the value, which its memory is free for until the value is computed again.
        flops: FLOPs of its matrix products in one call of the step; 0 if it has none.
        times: number of times that it runs in one call of the step.
    """

    name: str
    op_name: str
    source: str
    bytes: int
    flops: int
    times: int = 1


@dataclasses.dataclass(frozen=True)
class HeldBuffer:
    """A buffer that XLA's schedule keeps alive at the peak, and that an order of least memory would not.

    Fields:
        name: name of the instruction that defines the value.
        bytes: size of the buffer.
        shape: dimensions of the array on one device.
        dtype: dtype of the array, as in HLO.
        op_name: JAX's name of the operation that computes the value.
        source: "file.py:line" of this operation, "" if unknown.
        reader: name of the instruction that reads the value after the peak and could run earlier; "" if the value is
            computed earlier than needed.
        reader_op_name, reader_source: JAX's name and source line of this instruction.
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
