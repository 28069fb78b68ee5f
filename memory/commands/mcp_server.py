"""The MCP server of `bytescope mcp`, with one tool per command: report, explain, compare and fit.

A tool runs its command with --json=- in a process of its own, in the server's working directory. jax simulates one
number of devices per process, the client may change a module between two calls, and a crash of a compiler ends only
the call. The command ends with the call or with the server. A tool writes no file; `compare` and `fit` keep their cache
of compiled rows, as on the command line.

This module imports the MCP SDK, so only `mcp_command.run` imports it.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from bytescope.memory.commands import mcp_answers
from bytescope.memory.compare.grids import as_text
from bytescope.memory.devices.platform import JAX_FRACTION
from bytescope.memory.errors import in_one_line
from bytescope.memory.processes import ENDED

# Seconds between two progress notifications.
PROGRESS_SECONDS = 2.0
INSTRUCTIONS = """\
Reports what fills device memory in a compiled JAX program, without the device. Start with explain for an error message
and with report for a program. Change one thing, call report again and compare the bytes. Sizes are bytes on one device
(GiB = 2**30). Every answer has caveats: repeat those that matter. bytescope mcp --skill prints the whole procedure."""

Target = Annotated[
    str,
    Field(
        description="devices to compile for: h100:8 (GPUs of a host), h100:2x8 (hosts x GPUs), h100:8@0.9 (jax's pool "
        f"takes 90 % of each GPU's memory, default {100 * JAX_FRACTION.value:g} %), v5e:4x4 (a TPU slice), cpu:8, local"
    ),
]
Subject = Annotated[
    str,
    Field(
        description="what to look at: the user's step as path/to/file.py:function or package.module:function, which "
        "returns (step, (state, batch)) or (step, (state, batch), options of jax.jit such as {'donate_argnums': 0}), "
        "where arrays may be jax.ShapeDtypeStruct (the file is executed); an XLA dump, a file "
        "*after_optimizations.hlo.pb or its folder (XLA_FLAGS=--xla_dump_to=DIR); a config of bytescope train, such as "
        "llama_8b (bytescope list configs); or maxtext:llama2-7b"
    ),
]
Scalar = str | int | float | bool
Keys = Annotated[
    dict[str, Scalar] | None,
    Field(
        description="keys of the subject to set: {'data.seq_len': 4096} of a config, {'layers': 8} for a parameter of "
        "the function"
    ),
]


async def report(
    ctx: Context,
    target: Target,
    subject: Subject,
    keys: Keys = None,
    try_remedies: Annotated[
        bool, Field(description="also compile with the remedy of each finding that has options, and say what it frees")
    ] = False,
) -> dict[str, Any]:
    """Compiles one program for target and reports its memory: verdict (fits, tight,
    exceeds), predicted and limit bytes, breakdown of the peak, findings with remedies, largest buffers with source
    lines. Takes seconds to minutes."""
    words = [*words_of(subject, target), *make_flags(try_remedies=try_remedies)]
    return mcp_answers.report_answer(await run_command(ctx, "report", [*words, *key_flags(keys)]))


async def explain(
    ctx: Context,
    text: Annotated[str | None, Field(description="the error message or the whole log, as text")] = None,
    log: Annotated[str | None, Field(description="path of the log, instead of text")] = None,
    subject: Annotated[
        str | None, Field(description="the program that ran, as for report: a function, a dump, a config, maxtext:...")
    ] = None,
    keys: Keys = None,
    target: Annotated[
        str | None, Field(description="devices of the failed job, such as h100:8; only with subject")
    ] = None,
) -> dict[str, Any]:
    """Explains an out-of-memory message of JAX, XLA, NCCL, cuDNN or PyTorch (text or log: give one): what happened, the
    cause, the largest buffers listed, remedies, the cheapest first. With subject, says whether the failure is
    the size of this program. Without it, takes a second."""
    if (text is None) == (log is None):
        raise ToolError("give either text, the message itself, or log, the path of a file")
    words = words_of(subject, target)
    name = "-" if log is None else os.path.join(".", log)  # a name that begins with - is no flag
    result = await run_command(ctx, "explain", [name, *words, *key_flags(keys)], text or "")
    return mcp_answers.explain_answer(result)


async def compare(
    ctx: Context,
    target: Target,
    subject: Subject,
    keys: Keys = None,
    grid: Annotated[
        dict[str, list[Scalar]] | None,
        Field(
            description="values to compare, all combinations: {'layers': [8, 16]}; keys are parameters with defaults "
            "of the program's function, or config keys such as data.seq_len"
        ),
    ] = None,
    remat: Annotated[
        list[str] | None, Field(description="remat policies to compare, only with config: ['none', 'full', 'dots']")
    ] = None,
    what_if: Annotated[bool, Field(description="compare options of XLA for the one program instead of a grid")] = False,
) -> dict[str, Any]:
    """Compiles variants of one program for target and compares them: bytes, recomputed
    FLOPs (0 to 1), predicted seconds, whether each fits, and the best. Takes seconds per row."""
    words = [*words_of(subject, target), *make_flags(remat=remat, what_if=what_if)]
    words += [f"--grid={key}={','.join(map(as_text, values))}" for key, values in (grid or {}).items()]
    return mcp_answers.compare_answer(await run_command(ctx, "compare", [*words, *key_flags(keys)]))


async def fit(
    ctx: Context,
    target: Target,
    subject: Subject,
    keys: Keys = None,
    budget: Annotated[
        str | None, Field(description="memory per device, such as 72GiB (default: all that is available)")
    ] = None,
    batch_tokens: Annotated[
        int | None, Field(description="tokens per update over all devices, only with a config (default: its own)")
    ] = None,
    vary: Annotated[
        list[str] | None, Field(description="settings that may change, only with a config: ['remat', 'micro']")
    ] = None,
    lora: Annotated[bool, Field(description="train LoRA adapters instead of the weights, only with a config")] = False,
    max_compiles: Annotated[
        int | None, Field(description="maximum number of programs to compile, only with a config")
    ] = None,
    max_seconds: Annotated[
        float | None, Field(description="seconds after which no new compilation starts, only with a config")
    ] = None,
) -> dict[str, Any]:
    """Searches for the fastest variant that fits the memory of target, by compiling candidates. For a
    function: the least recomputation, as a policy for jax.checkpoint. For a config: its flags. If nothing
    fits: the missing bytes. Takes minutes."""
    flags = make_flags(
        budget=budget,
        batch_tokens=batch_tokens,
        vary=vary,
        lora=lora,
        max_compiles=max_compiles,
        max_seconds=max_seconds,
    )
    words = [*words_of(subject, target), *flags, *key_flags(keys)]
    return mcp_answers.fit_answer(await run_command(ctx, "fit", words))


def make_server() -> MCPServer:
    """Returns the server with its four tools. The description of a tool is the docstring of its function."""
    server = MCPServer(
        "bytescope", instructions=INSTRUCTIONS, version=metadata.version("bytescope"), log_level="WARNING"
    )
    for tool in (report, explain, compare, fit):
        server.add_tool(tool, description=" ".join((tool.__doc__ or "").split()))
    return server


def words_of(subject: str | None, target: str | None) -> list[str]:
    """Returns the words that name the subject and its target; [] if none is given.

    Raises ToolError for a target without a subject, and for a word that is a flag.
    """
    if subject is None and target is not None:
        raise ToolError(f"target={target} has no program: give subject too")
    words = [word for word in (subject, target) if word is not None]
    for word in words:
        if word.startswith("-"):
            raise ToolError(f"{word} is a flag: give a subject or a target")
    return words


def make_flags(**values: str | float | Sequence[str] | None) -> list[str]:
    """Returns the command-line flags of the arguments that are given: `batch_tokens=8` becomes --batch-tokens=8, True
    a flag without a value, a list a value with commas. None and False give no flag."""
    flags = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags.append(f"{flag}={','.join(value) if isinstance(value, list) else value}")
    return flags


def key_flags(keys: Mapping[str, Scalar] | None) -> list[str]:
    """Returns the arguments that set keys of the subject, --config.KEY=VALUE.

    Raises ToolError if a key begins with "-", because the command would read it as a flag.
    """
    if flags := [key for key in keys or {} if key.startswith("-")]:
        raise ToolError(f"{flags[0]} is not a key: leave the dashes out")
    return [f"--config.{key}={as_text(value)}" for key, value in (keys or {}).items()]


async def run_command(ctx: Context, command: str, flags: Sequence[str], stdin: str = "") -> dict[str, Any]:
    """Runs a command of bytescope with --json=- and returns its JSON, the result in its envelope.

    The client is notified of the progress: the seconds since the start. If the client cancels the call, the command is
    ended.

    stdin: the standard input of the command.

    Raises ToolError, with the command's error in one line, if the command has no result.
    """
    line = [command, *flags, "--json=-"]
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bytescope.memory",
        "served",
        *line,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # a group of its own; its workers end with it
    )
    output = asyncio.ensure_future(process.communicate(stdin.encode("utf-8", "replace")))
    try:
        while not (await asyncio.wait({output}, timeout=PROGRESS_SECONDS))[0]:
            seconds = time.monotonic() - started
            await ctx.report_progress(seconds, message=f"bytescope {command} has run for {seconds:.0f} s")
        out, err = output.result()
    finally:
        output.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(ValueError):  # no result, or the beginning of one
        return json.loads(out)
    raise ToolError(error_text(line, process.returncode or 0, err.decode("utf-8", "replace")))


def error_text(line: Sequence[str], code: int, stderr: str) -> str:
    """Returns the error of a command without a result, in one line: the line `error: ...` of the standard error. If the
    command crashed, returns the last line that it or the user's code printed, and how to see the other lines.

    line: the command line. code: the exit code.
    """
    stderr = stderr.replace(f"error: {ENDED}", f"\nerror: {ENDED}")  # the code may have ended within a line
    lines = [text for text in stderr.splitlines() if text.strip()]
    errors = [text.removeprefix("error: ") for text in lines if text.startswith("error: ")]
    if errors and not errors[-1].startswith(ENDED):
        return errors[-1]
    others = [text.strip() for text in lines if not text.startswith(("error: ", "note: "))]
    how = errors[-1] if errors else f"the command ended with exit code {code}"
    last = others[-1] if others else "it printed nothing"
    shown = shlex.join(["bytescope", *line])
    return in_one_line(f"{how}; the last line is: {last}; run it in a shell to see all: {shown}")
