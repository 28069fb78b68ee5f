"""bytescope report SCRIPT: reports on the training step of a script, without its data.

The script runs in a child process, because it may end, crash or hang. The child answers in a file: the source of a
program that `bytescope report FILE:program` reads.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytescope.memory import environment
from bytescope.memory.commands import report_command
from bytescope.memory.commands.arguments import Parser, check_files, is_setting, show_written, user_path, write
from bytescope.memory.errors import ReportError, in_one_line, message_of
from bytescope.memory.files import write_whole
from bytescope.memory.program import program_file
from bytescope.memory.subjects.function_subject import FunctionSubject
from bytescope.memory.subjects.opening import load_subjects

# Exit code if the script needs pieces (packages, data, shapes) that are missing.
_MISSING = 1
_LAST_LINES = 10
_CHILD = "import sys; from bytescope.memory.commands.init_command import answer; answer(sys.argv[1])"


_DESCRIPTION = """\
Runs a training script up to its first training step, without its data and
without an accelerator, and reports on this step. Or prints what is missing,
with file and line."""
_EXAMPLES = """\
examples:
  bytescope report train.py h100:8
  bytescope report train.py h100:8 -- --config=small
  bytescope report train.py h100 --value='train.py:40=int32[8,1024]'
  bytescope report train.py h100:8 --save-program=program.py

exit codes: 0 done, 1 pieces are missing, which are printed, 2 a mistake in the
command or its files, 3 does not fit, 130 stopped by Ctrl-C"""


def make_parser() -> Parser:
    """Returns the parser of `bytescope report SCRIPT`, without the arguments of the script, which follow `--`."""
    parser = Parser(
        prog="bytescope report",
        usage="bytescope report SCRIPT [TARGET] [options] [-- SCRIPT ARGUMENTS]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script; its own arguments follow --")
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        default="h100",
        help="the devices for which the script runs, such as h100:8; the script sees as many devices "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--save-program",
        metavar="FILE",
        type=user_path,
        help="also write a Python file with the step and its arguments, for bytescope report FILE:program",
    )
    parser.add_argument(
        "--value",
        metavar="LINE=VALUE",
        action="append",
        default=[],
        help="what a line of the script returns where its data is missing: a shape or a number, such as "
        "train.py:40=int32[8,128], or train.py:40=image:float32[8,28,28],label:int32[8]; repeat the flag for more "
        "lines",
    )
    parser.add_argument(
        "--without",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="treat an installed package as missing, such as one that loads data; repeat the flag for more packages",
    )
    parser.add_argument(
        "--auto-axes",
        action="store_true",
        help="for scripts written before jax 0.9: meshes of jax.make_mesh have axes of the type Auto, not Explicit",
    )
    parser.add_argument(
        "--function",
        metavar="NAME",
        help="the function that is the step (default: the first jitted one that computes gradients and updates)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="stop the script after SECONDS (default %(default)g)",
    )
    report_command.add_output(parser)
    parser.set_defaults(formulas=False, run=False)  # a script has neither
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line. The arguments of the script follow `--`."""
    own, script_arguments = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, script_arguments = own[:at], own[at + 1 :]
    if keys := [*filter(is_setting, own)]:
        raise ReportError(f"{keys[0]} cannot be used with a script: write the script's own arguments after --")
    args = make_parser().parse_intermixed_args(own)
    args.argv, args.overrides = script_arguments, []
    args.script = load_subjects().open_subject(args.script).name
    return args


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope report SCRIPT`. Returns the exit code of the report; or 1 if the script needs something that is
    missing, such as the shape of a batch. All missing pieces are printed."""
    check_files(args)
    if not os.path.isfile(args.script):
        raise ReportError(f"the script {args.script} does not exist: give the path of a Python file")
    if args.save_program is not None:
        _check_saved(args.save_program)
        return _report(args, args.save_program)
    with tempfile.TemporaryDirectory() as folder:
        return _report(args, Path(folder) / "program.py")


def _report(args: argparse.Namespace, file: Path) -> int:
    from bytescope.memory.devices import targets

    request = {
        "script": args.script,
        "argv": args.argv,
        "values": dict(map(_split_value, args.value)),
        "without": args.without,
        "step": args.function,
        "auto_axes": args.auto_axes,
        "out": str(file),
        "target": args.target,
        "devices": targets.parse(args.target).n_devices,
    }
    result = _run_child(request, args.timeout)
    if "error" in result:
        raise ReportError(result["error"])
    if "missing" in result:
        print(f"{args.script}: the step was not reached; missing:")
        for place, text in result["missing"]:
            print(f"  {place or args.script}: {in_one_line(text)}")
        if names := _functions_in(args.script):
            print(
                f"{args.script} defines {', '.join(names)}: bytescope report {args.script}:{names[0]} reports on a "
                "function that returns (step, arguments)"
            )
        return _MISSING
    write(file, result["text"])
    print(f"found {result['step']}")
    show_written(args.save_program)
    args.command, args.subject = "report", FunctionSubject(f"{file}:program", (), args.xla)
    return report_command.run(args)


def _functions_in(script: str) -> list[str]:
    try:
        statements = ast.parse(Path(script).read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    functions = [statement for statement in statements if isinstance(statement, ast.FunctionDef)]
    functions.sort(
        key=lambda function: len(function.args.args) > len(function.args.defaults)
    )  # without arguments first
    return [function.name for function in functions]


def _check_saved(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ReportError(f"cannot write {path}: there is no folder {folder}; create it or give another file")
    if path.exists() and not (path.is_file() and path.read_text(errors="replace").startswith(program_file.MARK)):
        raise ReportError(f"{path} exists and bytescope did not write it: give another file with --save-program")


def _split_value(text: str) -> tuple[str, str]:
    line, equals, value = text.rpartition("=")
    if not equals or ":" not in line:
        raise ReportError(
            f"--value={text} names no line: write file.py:LINE=dtype[dimensions], as train.py:40=int32[8]"
        )
    return line, value


def _run_child(request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Runs the script of a request in a child process. Returns the answer, whose keys the function `answer` describes.
    Raises ReportError if the child has not answered after `timeout` seconds, or ended without an answer."""
    with tempfile.TemporaryDirectory() as folder:
        answer_file, log_file = Path(folder) / "answer.json", Path(folder) / "log.txt"
        arguments = json.dumps({**request, "answer": str(answer_file)})
        # The script sees the target's number of devices, whatever this shell simulates.
        env = environment.child_variables(
            {environment.PLATFORMS: "cpu", environment.CPU_DEVICES: str(request["devices"])}
        )
        with log_file.open("wb") as log:
            try:
                child = subprocess.run(
                    [sys.executable, "-c", _CHILD, arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise ReportError(
                    f"{request['script']} has not reached a training step after {timeout:g} s: give a larger "
                    "--timeout, or arguments of the script after -- that make it start sooner"
                ) from None
        if answer_file.exists():
            answered: dict[str, Any] = json.loads(answer_file.read_text())
            return answered
        lines = log_file.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        print("\n".join(lines), file=sys.stderr)
        raise ReportError(
            f"{request['script']} ended the process with exit code {child.returncode} before its training step: its "
            "last lines are above"
        )


def answer(arguments: str) -> None:
    """Runs the script of a request (JSON) in this process, and writes the answer as JSON. Its keys are `text` (the
    source of the program file) and `step` (the name of the step); or `missing` (a list of what the script needs and
    does not have); or `error` (a message)."""
    from bytescope.memory.program.script_capture import capture
    from bytescope.memory.program.stand_ins import MissingPiece

    request = json.loads(arguments)
    script, argv = request["script"], request["argv"]
    options = {key: request[key] for key in ("step", "without", "auto_axes")}
    try:
        captured = capture(script, argv, values=request["values"], **options)
        out, target = Path(request["out"]), request["target"]
        text = program_file.file_text(captured, script, argv, out=out, target=target, **options)
        result: dict[str, Any] = {"text": text, "step": f"{captured.defined}, called at {captured.called}"}
    except MissingPiece as missing:
        result = {"missing": [(str(place) if place else None, text) for place, text in missing.pieces]}
    except ReportError as error:
        result = {"error": message_of(error)}
    write_whole(Path(request["answer"]), json.dumps(result))  # a script that calls os.fork may answer twice
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the script do not matter
