"""bytescope mcp: a client of the SDK calls the tools over standard input and output."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from bytescope.memory.cli import main
from bytescope.memory.commands import trainer_packages
from bytescope.memory.commands.mcp_command import skill_text
from support import memory_messages as written

pytest.importorskip("mcp.server.mcpserver", reason="pip install -e '.[mcp]'")

# A step with one weight, whose batch is the largest buffer.
PROGRAM = """
import jax, jax.numpy as jnp

def program(rows=64):
    def step(weight, x):
        return weight - jax.grad(lambda weight: (x @ weight).sum())(weight), x.mean()
    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    return step, shapes, {"donate_argnums": 0}
"""
# Makes imports of the trainer's packages fail in every Python of the server, as in the light install.
LIGHT = f"""
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {trainer_packages.PACKAGES}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
# Tool, arguments of each call.
CALLS = {
    "report": ("report", {"subject": "my.py:program", "target": "cpu"}),
    "explain": ("explain", {"text": written.training_log(written.gpu_buffers(random.Random(1)).text)}),
    "compare": ("compare", {"subject": "my.py:program", "target": "cpu", "grid": {"rows": [64, 128]}}),
    "no log": ("explain", {}),
    "wrong target": ("report", {"subject": "my.py:program", "target": "h101:8"}),
    "crash": ("report", {"subject": "exits.py:program", "target": "cpu"}),
    "file as flag": ("explain", {"log": "--json=written.json"}),
    "key as flag": ("report", {"subject": "maxtext:x", "target": "cpu", "keys": {"--json": "written.json"}}),
    "config": ("fit", {"subject": "tiny", "target": "cpu", "max_compiles": 1}),
}


async def call_all(folder, calls, environment):
    """Starts a server in `folder`. Returns its tools, the result of each call, and the messages of progress."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    messages = []

    async def note(progress, total, message):
        messages.append((progress, message))

    command = StdioServerParameters(
        command=sys.executable, args=["-m", "bytescope.memory", "mcp"], cwd=str(folder), env=environment
    )
    async with Client(stdio_client(command)) as client:
        tools = (await client.list_tools()).tools
        results = {}
        for name, (tool, arguments) in calls.items():
            results[name] = await client.call_tool(tool, arguments, progress_callback=note)
        return tools, results, messages


def environment(folder):
    return {**os.environ, "PYTHONPATH": str(folder / "path"), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "my.py").write_text(PROGRAM)
    (folder / "exits.py").write_text("import os\nos.write(2, b'the compiler crashed')\nos._exit(7)\n")
    (folder / "sleeps.py").write_text("import time\nopen('started', 'w').close()\ntime.sleep(300)\n")
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(LIGHT)
    return folder


@pytest.fixture(scope="module")
def served(folder):
    """(tools, call -> result, messages of progress) of a server without the trainer's packages."""
    return asyncio.run(call_all(folder, CALLS, environment(folder)))


def answer(served, name):
    result = served[1][name]
    assert not result.is_error, result.content[0].text
    return result.structured_content


def error(served, name):
    result = served[1][name]
    assert result.is_error and "\n" not in result.content[0].text
    return result.content[0].text


def test_the_tools_are_described(served):
    tools = {tool.name: tool for tool in served[0]}
    assert set(tools) == {"report", "explain", "compare", "fit"}
    for tool in tools.values():
        assert len(tool.description) < 400 and "\n" not in tool.description
        assert all(values["description"] for values in tool.input_schema["properties"].values())
    assert tools["report"].input_schema["required"] == ["target", "subject"]


def test_a_report_has_bytes_and_caveats(served):
    found = answer(served, "report")
    assert json.loads(served[1]["report"].content[0].text) == found
    assert found["verdict"] == "fits" and 0 < found["predicted_bytes"] <= found["limit_bytes"]
    assert found["breakdown"]["batch"] == 64 * 8 * 4 and found["breakdown"]["params"] == 8 * 8 * 4
    assert found["largest_buffers"][0]["type"] == "f32[64,8]" and "gradients" in found["breakdown"]
    assert any(row.get("source", "").endswith("my.py:6") for row in found["largest_buffers"])
    assert "schedule" not in found and len(json.dumps(found)) < 4000
    caveats = " ".join(found["caveats"])
    assert "compiled program, which was not run" in caveats and "The limit of" in caveats


def test_a_message_is_explained(served):
    found, sample = answer(served, "explain"), written.gpu_buffers(random.Random(1))
    assert found["requested_bytes"] == sample.requested and found["cause_kind"] == sample.cause
    assert found["culprits"][0]["shape"] == sample.shape and found["remedies"][0]["words"]
    assert "No program was compiled" in found["caveats"][-1]


def test_rows_are_compared(served):
    found = answer(served, "compare")
    assert [row["overrides"] for row in found["rows"]] == [{"rows": 64}, {"rows": 128}]
    small, large = (row["allocated_bytes"] for row in found["rows"])
    assert large - small >= 64 * 8 * 4 and all(row["fits"] for row in found["rows"])
    assert found["best_of_each"] and "which was not run" in found["caveats"][0]


def test_mistakes_are_one_line_with_the_remedy(served, folder):
    assert "give either text" in error(served, "no log")
    assert "unknown target 'h101:8': did you mean h100" in error(served, "wrong target")
    crash = error(served, "crash")
    assert "ended the process before the command was done, with exit code 7" in crash
    assert "the last line is: the compiler crashed;" in crash
    assert "bytescope report exits.py:program cpu" in crash
    assert "cannot read ./--json=written.json" in error(served, "file as flag")
    assert "--json is not a key" in error(served, "key as flag")
    assert not (folder / "written.json").exists()


def test_a_config_needs_the_trainer(served):
    assert error(served, "config").endswith(f"{trainer_packages.message('bytescope fit with the config tiny')}")


def test_no_file_is_written(served, folder):
    assert {path.name for path in folder.iterdir()} - {"__pycache__", "started"} == {
        "my.py",
        "exits.py",
        "sleeps.py",
        "path",
        "cache",
    }


@pytest.mark.parametrize("ending", ["the call", "the client", "the server"])
def test_a_command_ends_with(ending, folder):
    """The client sees progress, and the command and its process group end with the call and with the server."""
    (folder / "started").unlink(missing_ok=True)

    async def cancel():
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        noted = asyncio.Event()

        async def note(progress, total, message):
            assert progress > 0 and message.startswith("bytescope report has run for")
            noted.set()

        command = StdioServerParameters(
            command=sys.executable, args=["-m", "bytescope.memory", "mcp"], cwd=str(folder), env=environment(folder)
        )
        async with Client(stdio_client(command)) as client:
            arguments = {"subject": "sleeps.py:program", "target": "cpu"}
            call = asyncio.ensure_future(client.call_tool("report", arguments, progress_callback=note))
            while not (folder / "started").exists() or not noted.is_set():
                await asyncio.sleep(0.05)
            if ending == "the server":
                server = subprocess.check_output(["pgrep", "-P", str(os.getpid()), "-f", "bytescope.memory mcp"])
                os.kill(int(server), signal.SIGKILL)
            elif ending == "the call":
                call.cancel()
            if ending != "the client":
                await gone()
        await gone()

    async def gone():
        until = time.monotonic() + 30
        while subprocess.run(["pgrep", "-f", "report sleeps.py:program"], stdout=subprocess.DEVNULL).returncode == 0:
            assert time.monotonic() < until, "the command still runs"
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(cancel(), 120))


@pytest.mark.quick
def test_without_the_sdk(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    monkeypatch.delitem(sys.modules, "bytescope.memory.commands.mcp_server", raising=False)
    assert main(["mcp"]) == 2
    assert "pip install -e '.[mcp]'" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_programs_are_fitted(folder):
    (folder / "scanned.py").write_text(re.findall(r"^```python\n(.*?)^```", skill_text(), re.DOTALL | re.MULTILINE)[1])
    calls = {"program": ("fit", {"subject": "scanned.py:program", "target": "cpu"})}
    plain = {name: value for name, value in environment(folder).items() if name != "PYTHONPATH"}
    found = asyncio.run(call_all(folder, calls, plain))
    best = answer(found, "program")["best"]
    assert best["fits"] and best["allocated_bytes"] > 0 and best["breakdown"]["params"] > 0
