"""A user's own function, MODULE:FUNCTION or FILE.py:FUNCTION, as a subject."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from bytescope.memory.devices.xla_flags import parse_flags
from bytescope.memory.subjects.subject import Subject

if TYPE_CHECKING:
    from bytescope.memory.compare.prepared_program import PreparedProgram
    from bytescope.memory.compare.program_factory import ProgramFactory

_NEEDS_CONFIG = "because it needs a config: give a config instead"
_SEARCHES_CONFIG = "because it searches the keys of a config: leave it out"


class FunctionSubject(Subject):
    """A function that returns a step and its arguments. Its parameters are the keys."""

    kind = "function"
    is_a = "a function"
    has = ("program", "report", "variants", "fit", "names")
    lacks: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("--formulas", "--run", "--generate"), _NEEDS_CONFIG),
        "compare --remat": "because it needs a config: write --grid=KEY=V1,V2",
        **{
            f"fit --{flag}": _SEARCHES_CONFIG
            for flag in ("batch-tokens", "vary", "lora", "measure", "max-compiles", "max-seconds", "jobs", "no-cache")
        },
    }
    parts: ClassVar[Mapping[str, str]] = {
        "fit": "memory.commands.fit_program",
        "names": "memory.commands.names_program",
    }

    def check(self, target: str) -> None:
        """Raises ReportError if the name has not the form of a function, or there is no such target."""
        from bytescope.memory.program import user_program

        user_program.split(self.name)
        super().check(target)

    def start(self, target: str) -> str:
        """As for every subject. On a machine without an accelerator there are as many simulated devices as the target
        has, for a mesh that the function builds."""
        from bytescope.memory.devices.chips import base_name
        from bytescope.memory.devices.platform import simulate_devices

        platform = super().start(target)
        if platform == "cpu" and base_name(target) not in ("local", "cpu"):
            simulate_devices([f"cpu:{self.devices(target).n_devices}"])
        return platform

    def program(self, target: str) -> PreparedProgram:
        """Calls the function. Returns the program that it returns, for the target."""
        from bytescope.memory.compare.program_factory import FunctionFactory, load_factory
        from bytescope.memory.subjects.subject import with_program_host_memory

        factory, options = load_factory(self.name), dict(parse_flags(self.xla))
        # The name of the target is parsed after the user's function, which may set up jax.
        devices: Any = target if isinstance(factory, FunctionFactory) else self.devices(target)
        keys, own_options = factory.split_options(dict(self.keys), devices)
        program, options = factory(keys, devices), {**(own_options or {}), **options}
        if options:
            program = dataclasses.replace(program, compile=functools.partial(program.compile, options))
        return dataclasses.replace(program, complete=with_program_host_memory)

    def factory(self, target: str) -> ProgramFactory:
        """Returns what calls the function with other arguments."""
        from bytescope.memory.compare.program_factory import load_factory
        from bytescope.memory.devices.platform import choose_platform, simulate_devices

        choose_platform()  # before the user's module imports jax
        simulate_devices([target])
        return load_factory(self.name)
