"""Protocols for the parts of jax's devices and stages that this package uses.

jax declares no types for its devices, and other libraries wrap its stages in their own classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class JaxDevice(Protocol):
    """The part of the interface of `jax.Device` that bytescope uses. Only TPUs have `coords`. On a CPU,
    `memory_stats()` returns None.
    """

    @property
    def id(self) -> int: ...

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    @property
    def process_index(self) -> int: ...

    @property
    def local_hardware_id(self) -> int | None: ...

    @property
    def coords(self) -> Sequence[int]: ...

    @property
    def client(self) -> Any: ...

    def memory_stats(self) -> dict[str, int] | None: ...

    def addressable_memories(self) -> Sequence[Any]: ...


class CompiledStage(Protocol):
    """The part of the interface of `jax.stages.Compiled` that bytescope uses: an executable with its arguments."""

    @property
    def args_info(self) -> Any: ...

    @property
    def input_shardings(self) -> Any: ...

    @property
    def output_shardings(self) -> Any: ...

    def memory_analysis(self) -> Any: ...

    def runtime_executable(self) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LoweredStage(Protocol):
    """The part of the interface of `jax.stages.Lowered` that bytescope uses: a program in StableHLO."""

    @property
    def args_info(self) -> Any: ...

    @property
    def out_info(self) -> Any: ...

    def compile(self, compiler_options: dict[str, Any] | None = None) -> CompiledStage: ...

    def compiler_ir(self, dialect: str | None = None) -> Any: ...


class TracedStage(Protocol):
    """The part of the interface of `jax.stages.Traced` that bytescope uses: a traced function."""

    @property
    def jaxpr(self) -> Any: ...

    @property
    def args_info(self) -> Any: ...

    @property
    def in_tree(self) -> Any: ...

    @property
    def out_tree(self) -> Any: ...

    @property
    def fun_name(self) -> str: ...

    # Private in jax: the parameters of the jit equation, and the types and shardings of the arguments' leaves.
    @property
    def _params(self) -> dict[str, Any]: ...

    @property
    def _meta_tys_flat(self) -> Any: ...

    def lower(self) -> LoweredStage: ...
