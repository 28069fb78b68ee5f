"""bytescope: what every byte of a compiled JAX program's device memory is."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from bytescope.memory.errors import ReportError

EPILOG = """\
examples:
  bytescope report --config=tiny                         the trainer's step on this machine
  bytescope report --config=llama_8b --target=h200:8     the same for GPUs that are not here
  bytescope report --hlo=step.after_optimizations.hlo.pb any JAX program's dump, no config
  bytescope report --config=llama_8b --target=h200 --run  and init, evaluation and sample beside the step
  bytescope report --config=tiny --json=a.json --html=a.html --export=xprof/
  bytescope diff a.json b.json --fail-above=2            exit 1 when the peak grew over 2 %
  bytescope compare --config=llama_8b --target=h200:8 --remat=none,full,dots --html=c.html
  bytescope compare --config=llama_8b --target=h200:8 --formulas \\
      --remat='none,full,custom(q_rot,v,context),custom(attn_out)+offload(block_in)'
  bytescope compare --grid=config=llama_8b,llama_70b --grid=data.seq_len=1024,4096,16384 \\
      --remat=none,full --target=h100:8 --html=growth.html      growth charts; again: it resumes
  bytescope levers --config=llama_8b --target=h200 --html=levers.html
                                                                what each memory saving saves, and costs
  bytescope fit --config=llama_8b --target=h100:8 --batch-tokens=4194304
                                                                the fastest way to train this there, by compiling
  bytescope front --config=llama_8b --target=h100:8 --html=front.html
                                                                the least recomputation at every budget
  bytescope names --config=llama_8b --target=h200:8      what a custom policy can keep
  bytescope trace runs/tiny/profile                      where a traced step's time went; any JAX trace
  bytescope estimate --params=7e9                        formulas only, at once

exit codes: 0 done, 1 grew above --fail-above, 2 a mistake in the command or its files, 3 nothing fits,
130 stopped by Ctrl-C"""

# Subcommand -> (module with add_arguments(parser) and run(args, overrides, trainer) -> exit code, what it does).
COMMANDS = {
    "report": ("bytescope.memory.commands.report", "peak, composition, ledger, timeline and findings of one program"),
    "compare": ("bytescope.memory.commands.compare", "policies and any other keys of a config against each other, in parallel"),
    "levers": ("bytescope.memory.commands.levers", "the staircase: fp32, bf16, chunked loss, flash attention, remat ... in bytes"),
    "fit": ("bytescope.memory.commands.fit", "from a budget to the configuration to run: remat, micro-batch, mesh, offload"),
    "front": ("bytescope.memory.commands.frontier", "at each of ten budgets, from full to none, the least recomputation that fits"),
    "estimate": ("bytescope.memory.commands.estimate", "bytes and FLOPs by formula, at once; a page with inputs to play with"),
    "names": ("bytescope.memory.commands.names", "every checkpoint name: shape, sharding, bytes, FLOPs of making it again"),
    "trace": ("bytescope.memory.commands.trace", "where a step's time went by phase and component, from a profiler's trace"),
    "diff": ("bytescope.memory.commands.diff", "what grew or shrank between two reports' JSON files"),
}


class Parser(argparse.ArgumentParser):
    """Errors of the command line in one line."""

    def error(self, message: str) -> NoReturn:
        raise ReportError(f"{message}; see bytescope --help")


def parser(command: str | None = None) -> Parser:
    """The parser of all commands; the arguments of `command` alone are filled in."""
    out = Parser(prog="python -m memory", description=__doc__.split(": ", 1)[1], epilog=EPILOG,
                 formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == command:
            importlib.import_module(module).add_arguments(sub)
    return out


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    try:
        rest, overrides = _split(argv)
        command = next((word for word in rest if word in COMMANDS), None)
        args = parser(command).parse_args(rest)
        return importlib.import_module(COMMANDS[args.command][0]).run(args, overrides, Trainer())
    except ValueError as error:  # ReportError, and the trainer's errors with exit codes of their own
        if not hasattr(error, "exit_code"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class Trainer:
    """What the commands ask of the trainer, and the one place where this package knows of it.

    The hooks raise the trainer's errors, with their exit codes; none starts jax before it has to.
    """

    def config(self, name: str, overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """The config as the trainer resolves it, dotted key -> value, without starting jax."""
        from bytescope.train.config import flatten, load

        return flatten(load(name, overrides))

    def program(self, name: str, overrides: Sequence[tuple[str, str]], target: Any) -> Any:
        """The trainer's `Program` of a config on a target's devices, nothing compiled yet."""
        from bytescope.train.config import load
        from bytescope.train.program import build

        config = load(name, overrides)
        try:
            return build(config, target.devices())
        except ValueError as error:  # a config that cannot run there: the message says what to change
            if hasattr(error, "exit_code"):
                raise
            raise ReportError(" ".join(str(error).split())) from error

    def settled(self, program: Any) -> dict[str, Any]:
        """What a program made of its config: the kernel, the mesh without -1, and `segments`: for each range of
        layers its {"layers", "policy", "groups", "save", "offload"}, the last two names of tensors; and `batch`,
        its algebra in words."""
        from bytescope.model.remat.policies import POLICIES

        plan = program.remat
        segments = []
        for segment in plan.segments(program.model.n_layers):
            moved, policy = segment.policy.moved, segment.name if segment.name in POLICIES else "custom"
            segments.append({"layers": segment.stop - segment.start, "policy": policy, "groups": segment.groups,
                             "save": [name for name in segment.policy.names if name not in moved],
                             "offload": list(moved)})
        mesh = {f"mesh.{axis}": size for axis, size in program.mesh.shape.items()}
        return {"model.attention": program.kernel[0], "batch": str(program.batch), **mesh, "segments": segments}

    def describe(self, name: str, overrides: Sequence[tuple[str, str]], target: Any) -> dict[str, Any]:
        """What the search for the least recomputation has to know of a config on a target, nothing compiled.

        `block`: a `remat.block_graph.Block` as JSON, of one micro-batch; `micro_steps`: micro-batches of one call;
        `policies`: policy -> names that it keeps, null where that is the compiler's to say, and `moving`: the same of
        those that move tensors to host memory; `tokens_per_update`.
        """
        from bytescope.memory.plan.worker import tokens_of
        from bytescope.train.planning.remat_auto import describe_block, fixed_policies

        program = self.program(name, (*overrides, ("model.scan", "true")), target)
        micro_steps = program.batch.accumulation if program.scanned else 1
        return {"block": dataclasses.asdict(describe_block(program)), "micro_steps": micro_steps,
                "policies": fixed_policies(), "moving": fixed_policies(moving=True),
                "tokens_per_update": tokens_of(program)}

    def choices(self, program: Any) -> str:
        """What a program chose for its devices, and why."""
        return "\n".join(f"{what} {row} ({why})" for what, (row, why) in (
            ("attention", program.kernel), ("products", program.matmul)))

    def kept(self, program: Any) -> Any:
        """What the trainer's loop keeps on a device beside a program's arguments: a `attribution.runtime_overheads.Loop`."""
        from bytescope.train.planning.run_peak import kept

        return kept(program)

    def companions(self, program: Any) -> dict[str, int]:
        """Bytes that the other programs of a run come to on a device, by name; compiles them."""
        from bytescope.train.planning.run_peak import peaks

        return peaks(program)

    def vocabulary(self) -> tuple[str, ...]:
        """Every checkpoint name of the trainer's model."""
        from bytescope.model.names import NAMES

        return tuple(NAMES)

    def names(self, name: str, overrides: Sequence[tuple[str, str]], target: Any) -> tuple[Any, Any]:
        """(jaxpr of a config's gradient, sharding of a name's tensor as (text, parts)) for `memory names`."""
        from bytescope.model.names import NAMES
        from bytescope.train.parallel.axes import activation_axes

        program = self.program(name, overrides, target)

        def sharding(tensor: str) -> tuple[str, int]:
            letters = NAMES[tensor][0]
            dims = program.layout.split(activation_axes(letters))
            text = ", ".join(f"{letter} {' x '.join(dim)}" for letter, dim in zip(letters, dims) if dim)
            return text or "whole", math.prod(program.mesh.shape[axis] for dim in dims for axis in dim)

        return program.trace_gradient(), sharding

    def sources(self) -> list[Path]:
        """Folders whose .py files decide what the step is."""
        found = (importlib.util.find_spec(package) for package in ("bytescope.model", "bytescope.train"))
        return [Path(folder) for spec in found if spec for folder in spec.submodule_search_locations or ()]


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(arguments, config overrides); only a command line with overrides needs the trainer for that."""
    if not any(argument.lstrip("-").startswith("config.") for argument in argv):
        return list(argv), []
    from bytescope.train.config import split_overrides

    return split_overrides(argv)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
