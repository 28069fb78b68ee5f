"""Saves the figures of every command and of every kind of subject, and compares two trees by them.

    python tests/bench/figures.py save FILE [--bytescope=PATH] [--only=NAME,...]
    python tests/bench/figures.py compare FILE [--bytescope=PATH] [--only=NAME,...]

`save` runs each case through the executable PATH (default: the one beside this Python) with small programs and
described targets, and writes the figures of its JSON: bytes, predicted seconds, verdicts, counts, losses, tokens. With
--only it replaces these cases in FILE. `compare` runs the cases again, prints each difference and exits with 1 if there
is any. figures.json has the figures of the tree with 14 commands, for the versions of jax and jaxlib that it names. All
cases take about four minutes on two cores. A case that reads what an earlier case of its group wrote needs that case.

A case names the ability that it shows, and how the ability is called today. When a command is renamed, only the line
of the case changes; its figures stay comparable. A figure whose key is gone counts as moved if a new key of the case
has its value.

outputs.py compares texts, pages and JSON of two trees character by character, and needs rows of expected differences
when a layout changes. This script compares only figures, against a file in the repository, so layouts may change.
"""

import argparse
import concurrent.futures
import dataclasses
import gzip
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import outputs
import outputs_cases

ROOT = Path(__file__).parents[2]
# Longer lists, of rows and of numbers, are recorded as their length and sums.
MAX_ROWS, MAX_NUMBERS = 8, 32
# Keys of measured values, of dates, paths and versions, and of what a case gives (its config and target).
NOT_RECORDED = re.compile(
    r"versions|schema|\w*compile_seconds|date|path|file|folder|workdir|source|measured|\w*tokens_per_s|step_time_s"
    r"|data_wait_s|mfu|hfu|memory|time|elapsed\w*|config|target|shape|unseen|scheduler_held|request|given|host_memory"
    r"|command_memory"
)
# A text is recorded if it is one word, such as a verdict or the name of a policy.
WORD = re.compile(r"[\w.+:,@()=-]{1,60}")
SECONDS_TOLERANCE, RUN_TOLERANCE = 1e-9, 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """A call whose figures are recorded.

    Attributes:
        name: the ability, such as "report of a config".
        line: how the ability is called today: the arguments of bytescope, or `python` and a function of
          outputs_library.py. "--json=FILE" is added if `file` is not given.
        file: the file that has the figures: JSON, JSON lines, or a page with data; "" if there is none.
        drop: keys whose values are measured in this case.
        is_run: a program runs in this case, so its floats have RUN_TOLERANCE.
        env: additional environment variables.
    """

    name: str
    line: str
    file: str | None = None
    drop: str = ""
    is_run: bool = False
    env: dict[str, str] = dataclasses.field(default_factory=dict)


# ---- the cases; those of a group run one after the other in one folder

COMPILED = [
    Case("report of a config", "report small.py h100:8 --formulas"),
    Case("report of a large config", "report llama_8b rtx4090 --config.model.n_layers=2 --config.data.seq_len=4096"),
    Case("report of offloading", "report small.py h100:8 --config.offload.optimizer=True "
         "--config.remat.policy=offload"),
    Case("report of experts", "report experts.py h100:8 --config.mesh.expert=8 --config.model.router_bias=True"),
    Case("report of a pipeline", "report small.py h200:8 --config.mesh.stage=4 --config.mesh.fsdp=2 "
         "--config.batch.mode=scan --config.batch.accumulation=8 --config.batch.micro=1"),
    Case("report of generation", "report small.py h100 --generate --weights=int4_g64 --kv=int8 --sequences=8 "
         "--length=1024"),
    Case("report of all programs of a run", "report mine.py cpu --rates=rates.json --run", drop="limit.*|fits"),
    Case("report with allocators", "report small.py h100 --allocators"),
    Case("report of a function", "report mlp.py:program h200"),
    Case("report of a function on GPUs", "report parallel.py:tensor_parallel h100:8"),
    Case("report with tried remedies", "report plain_jax.py:decode_kept a100-80g --try-remedies"),
    Case("write a dump", "python dump", "", env={"XLA_FLAGS": "--xla_dump_to=dump --xla_dump_hlo_as_proto"}),
    Case("report of a dump", "report dump/ h100"),
    Case("read a script", "report script.py h100 --value=script.py:16=float32[4,16] --save-program=program.py", ""),
    Case("report of a script", "report program.py:program h100"),
    Case("names of a config", "report small.py h200:8 --names"),
    Case("names of a function", "report mlp.py:loss h200 --names"),
    Case("audit of a config", "report small.py h100 --config.remat.policy=offload --audit --strict"),
    Case("audit of a function", "report plain_jax.py:decode_kept a100-80g --audit"),
    Case("explain a log", "explain job.log"),
    Case("explain a log with a config", "explain job.log small.py h100"),
    Case("diff of two reports", "diff report_of_a_config.json report_of_offloading.json --fail-above=2"),
    Case("check of budgets", "check --pyproject=budgets.toml"),
    Case("estimate of a number of parameters", "estimate gpt:7e9"),
    Case("estimate of a config", "estimate llama_8b h100:2x8 mesh.strategy=zero3 mesh.fsdp=8 mesh.tensor=2"),
    Case("estimate of experts", "estimate gpt:47b h100:8 model.experts=8 model.experts_per_token=2 mesh.expert=8 "
         "mesh.strategy=zero3"),
    Case("compare policies", "compare small.py h200 --jobs=1 "
         "--remat='none,full,custom(attn_out)+offload(block_in)'"),
    Case("compare keys", "compare small.py --grid=batch.micro=1,2 --grid=target=h100:8,rtx4090 --jobs=1"),
    Case("compare arguments of a function", "compare mlp.py:program h100 --grid=width=256,512 --jobs=1"),
    Case("compare savings", "compare small.py h200 --levers --savings=fp32,bf16,loss,full,adamw_8bit,offload --jobs=1"),
    Case("least time per budget", "fit small.py h100 --budgets=3 --jobs=1"),
    Case("least FLOPs per budget", "fit small.py h100 --budgets=2 --cost=flops --auto-offload --jobs=1"),
    Case("fit a config", "fit small.py h100:2 --batch-tokens=65536 --budget=2GiB --max-compiles=6 --jobs=1",
         drop="seconds"),
    Case("fit by one setting", "fit small.py rtx4090 --vary=micro --max-compiles=4 --jobs=1", drop="seconds"),
    Case("fit with nothing that fits", "fit llama_8b rtx4090 --budget=1GiB --vary=remat --max-compiles=2 --jobs=1 "
         "--config.model.n_layers=2", drop="seconds"),
    Case("fit LoRA", "fit small.py l4 --lora --max-compiles=2 --jobs=1", drop="seconds"),
    Case("fit a function", "fit mlp.py:program h100 --budget=60MiB", drop="seconds"),
    Case("pipeline schedules", "estimate llama_8b --config.model.n_layers=40 --stages=8 --micro-batches=32"),
    Case("own runs against predictions", "calibrate --runs=runs.csv"),
    Case("rates from own runs", "calibrate --runs=runs.csv --out=from_runs.json", "from_runs.json"),
    Case("trace with a report", "report profile/memory.json --trace=profile"),
    Case("list of configs", "list configs"),
    Case("list of targets", "list targets"),
    Case("list of keys", "list keys"),
    Case("list of policies", "list policies"),
    Case("report over MCP", "mcp", ""),
]  # fmt: skip

LORA = "--lora --config.lora.rank=4 --config.data.source=texts/ --config.data.seq_len=64 --config.batch.micro=2"
RUNS = [
    Case("train", "train mine.py --workdir=run --rates=rates.json --config.train.steps=80 --config.train.log_every=20 "
         "--config.train.eval_every=40 --config.train.checkpoint_every=40", "run/metrics.jsonl"),
    Case("train on two devices", "train mine.py --workdir=fsdp --rates=rates.json --config.mesh.strategy=zero3 "
         "--config.train.steps=3", "fsdp/metrics.jsonl", env={"JAX_NUM_CPU_DEVICES": "2"}),
    Case("train experts", "train mine.py --workdir=experts --rates=rates.json --config.model.experts=4 "
         "--config.model.d_expert=64 --config.batch.accumulation=2 --config.train.steps=3",
         "experts/metrics.jsonl"),
    Case("prepare", "prepare --source=texts/ --out=shards/ --shard-tokens=20000", "shards/index.json"),
    Case("train on shards", "train mine.py --workdir=on_shards --config.data.source=shards/ --config.train.steps=2 "
         "--rates=rates.json", "on_shards/metrics.jsonl"),
    Case("page of a run", "report run --html=run.html", "run.html",
         drop="in_use|peak|predicted|tokens|columns|rows|limit.*|capacity.*|host.*"),
    Case("diff of two runs", "diff run fsdp"),
    Case("export", "export run exported/ --dtype=float32", "exported/config.json"),
    Case("report of a folder of weights", "report hf:exported h100"),
    Case("generate greedily", "generate exported/ --prompts=questions.jsonl --out=answers.jsonl --max-tokens=12 "
         "--temperature=0", "answers.jsonl"),
    Case("score", "generate run --score=text.txt"),
    Case("quantize", "export exported/ awq/ --group=32 --awq=text.txt --length=64 --samples=8"),
    Case("generate from quantized weights", "generate awq/ --prompts=questions.jsonl --out=awq.jsonl --max-tokens=12 "
         "--temperature=0", "awq.jsonl"),
    Case("fine-tune LoRA", f"train hf:exported {LORA} --config.train.steps=2 --workdir=lora --rates=rates.json",
         "lora/metrics.jsonl"),
    Case("export of LoRA", "export lora adapters/", "adapters/adapter_config.json"),
]  # fmt: skip
GROUPS = {
    "compiled": COMPILED,
    "runs": [dataclasses.replace(case, is_run=True) for case in RUNS],
}

# ---- files that the cases read, besides those of outputs_cases.py

MLP = '''"""Layers under jax.checkpoint, and their loss."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


def layer(x, w):
    return checkpoint_name(jnp.tanh(x @ w), "hidden") @ w.T + x


def mean_loss(params, x):
    for w in params["layers"]:
        x = jax.checkpoint(layer)(x, w)
    return jnp.mean((x @ params["head"]) ** 2)


def shapes(width, layers):
    shape = jax.ShapeDtypeStruct
    params = {"layers": [shape((width, 4 * width), "float32")] * layers, "head": shape((width, 64), "float32")}
    return params, shape((1024, width), "float32")


def loss(width=512, layers=4):
    return mean_loss, shapes(width, layers)


def program(width=512, layers=4):
    def step(params, x):
        value, gradients = jax.value_and_grad(mean_loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    return step, shapes(width, layers), {"donate_argnums": 0}
'''
SCRIPT = """import argparse

import jax
import jax.numpy as jnp
import no_such_loader


@jax.jit
def step(w, x):
    return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


parser = argparse.ArgumentParser()
width = parser.parse_args() and 8
w = jax.random.normal(jax.random.key(0), (16, width))
for x in no_such_loader.Loader("train"):
    w = step(w, x)
"""
LOG = """step 1 loss 2.0
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 90194313216 bytes.
"""
BUDGETS = """
[tool.bytescope.budgets.mlp]
program = "mlp.py:program"
target = "h100"
budget = "64MiB"

[tool.bytescope.budgets.small]
config = "small.py"
target = "h100:8"
budget = "1GiB"
keys = { "batch.micro" = 1 }
"""
OWN_RUNS = "config,target,seconds,bytes,model.n_layers,batch.micro\n" + "".join(
    f"tiny,h100,{seconds},2GiB,{layers},{micro}\n"
    for seconds, layers, micro in ((0.004, 2, 4), (0.007, 4, 4), (0.013, 4, 8))
)
TRACE = ROOT / "tests" / "memory" / "profile" / "traces" / "llama_1b_minimal"
MCP_CALL = {"name": "report", "arguments": {"subject": "small.py", "target": "h100"}}


def write_input_files(work: Path) -> None:
    outputs_cases.write_input_files(work, None)
    for name, text in (("mlp.py", MLP), ("script.py", SCRIPT), ("job.log", LOG), ("budgets.toml", BUDGETS)):
        (work / name).write_text(text)
    (work / "runs.csv").write_text(OWN_RUNS)
    (work / "profile").mkdir()
    (work / "profile" / "step.xplane.pb").write_bytes(gzip.decompress(Path(f"{TRACE}.xplane.pb.gz").read_bytes()))
    shutil.copyfile(f"{TRACE}.report.json", work / "profile" / "memory.json")


# ---- figures


def figures_of(value: Any, drop: re.Pattern[str], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key with dots, figure) of each number, truth value and word in JSON."""
    if isinstance(value, dict):
        for name, each in value.items():
            if not NOT_RECORDED.fullmatch(name) and not drop.fullmatch(name):
                yield from figures_of(each, drop, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and {type(each) for each in value} <= {int, float}:
        yield key, value if len(value) <= MAX_NUMBERS else [len(value), sum(value)]
    elif isinstance(value, list) and len(value) > MAX_ROWS:
        yield f"{key}.count", len(value)
        columns: dict[str, list[int | float]] = {}
        for row in value:
            for name, figure in figures_of(row, drop):
                if isinstance(figure, int | float) and "." not in name:
                    columns.setdefault(name, []).append(figure)
        for name, numbers in columns.items():
            yield f"{key}.sum.{name}", sum(numbers)
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from figures_of(each, drop, f"{key}.{i}")
    elif isinstance(value, bool | int | float) or (isinstance(value, str) and WORD.fullmatch(value)):
        yield key, value


def read_values(path: Path) -> Any:
    """Returns the JSON of a file: the result of a command, a list of rows, or the data of a page; {} without a file."""
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        return outputs.Page.read(text).data
    if path.suffix == ".jsonl":
        return {"row": [json.loads(line) for line in text.splitlines()]}
    value = json.loads(text)
    return value["result"] if isinstance(value, dict) and "result" in value else value


def call_over_mcp(command: list[str], work: Path, environment: dict[str, str]) -> Any:
    """Calls one tool of the server and returns its answer."""
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "figures", "version": "1"}}
    messages: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": MCP_CALL},
    ]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=work, env=environment, text=True, **pipes) as server:
        assert server.stdin and server.stdout
        server.stdin.write("".join(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages))
        server.stdin.flush()
        answer = next(line for line in map(json.loads, server.stdout) if line.get("id") == 2)
        server.stdin.close()
    return answer["result"].get("structuredContent", answer["result"])


def run_case(group: outputs.Group, case: Case) -> dict[str, Any]:
    """Runs a case and returns its record: line, exit code and figures."""
    started = time.monotonic()
    file, line = case.file, case.line
    if file is None:
        file = f"{case.name.replace(' ', '_')}.json"
        line += f" --json={file}"
    run = outputs_cases.case(case.name, line, env=case.env)
    drop = re.compile(case.drop or "$")
    if case.line == "mcp":
        code: int | str = 0
        values = call_over_mcp(group.command(run), group.work, group.environment(run, 100))
        figures = dict(figures_of(values, drop))
    else:
        code, _, stderr = group.run(run, 100)
        figures = dict(figures_of(read_values(group.work / file), drop)) if file else {}
        if file and not figures:
            outputs.say(f"{case.name}: no figures\n{stderr[-2000:]}")
    outputs.say(f"{case.name}: exit {code}, {len(figures)} figures, {time.monotonic() - started:.0f} s")
    return {"line": case.line, "exit": code, "figures": figures}


def run_cases(executable: Path, only: str) -> dict[str, dict[str, Any]]:
    """Runs the cases, each group in its own folder, and returns the records by the names of the cases."""
    folder = Path(tempfile.mkdtemp(prefix="figures-"))
    records = {}

    def run_group(name: str) -> None:
        group = outputs.Group(name, folder / name, folder, executable, {})
        write_input_files(group.work)
        for case in GROUPS[name]:
            if not only or case.name in only.split(","):
                records[case.name] = run_case(group, case)

    try:
        with concurrent.futures.ThreadPoolExecutor(len(GROUPS)) as pool:
            list(pool.map(run_group, GROUPS))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return records


# ---- compare


def is_equal(before: Any, after: Any, tolerance: float) -> bool:
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return all(is_equal(one, other, tolerance) for one, other in zip(before, after))
    if isinstance(before, float) and isinstance(after, int | float) and not isinstance(after, bool):
        return math.isclose(before, after, rel_tol=tolerance, abs_tol=0) or (math.isnan(before) and math.isnan(after))
    return type(before) is type(after) and before == after


def differences(before: dict[str, Any], after: dict[str, Any], tolerance: float) -> Iterator[str]:
    """Yields a line for each figure of one case that changed or is gone. A figure under a new key is not a change."""
    if before["exit"] != after["exit"]:
        yield f"exit code: {before['exit']} -> {after['exit']}"
    old, new = before["figures"], after["figures"]
    unknown = [figure for key, figure in new.items() if key not in old]
    for key, figure in old.items():
        if key in new:
            if not is_equal(figure, new[key], tolerance):
                yield f"{key}: {figure!r} -> {new[key]!r}"
        elif not any(is_equal(figure, each, tolerance) for each in unknown):
            yield f"{key}: {figure!r} is gone"


def compare(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> int:
    """Prints the differences, and returns 1 if there are any. Records are those of run_case."""
    count = 0
    cases = {case.name: case for group in GROUPS.values() for case in group}
    for name, record in after.items():
        if name not in before:
            print(f"{name}: new case")
            continue
        tolerance = RUN_TOLERANCE if cases[name].is_run else SECONDS_TOLERANCE
        for line in differences(before[name], record, tolerance):
            print(f"{name}: {line}")
            count += 1
    print(f"{count} differences in {len(after)} cases" if count else f"no difference in {len(after)} cases")
    return 1 if count else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("save", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--bytescope", type=Path, default=Path(sys.executable).parent / "bytescope")
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    args = parser.parse_args()
    started = time.monotonic()
    executable = args.bytescope.absolute()
    versions = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    saved = json.loads(args.file.read_text(encoding="utf-8")) if args.file.is_file() else {"cases": {}}
    if args.action == "compare" and versions != saved["versions"]:
        print(f"note: the figures are of {saved['versions']}, and this is {versions}")
    records = run_cases(executable, args.only)
    print(f"{len(records)} cases in {time.monotonic() - started:.0f} s")
    if args.action == "compare":
        return compare(saved["cases"], records)
    cases = (saved["cases"] if args.only else {}) | records
    args.file.write_text(json.dumps({"versions": versions, "cases": cases}, indent=0) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
