"""Host memory of commands by phase: predicted by the ledger, and measured (VmHWM, reset at the start of each phase).

    python tests/bench/host_memory.py --list
    python tests/bench/host_memory.py report_gpt2_small train_tiny --json=rows.json
    python tests/bench/host_memory.py --all --json=rows.json --assert

The cases, their kinds, and the kinds whose measurements may set a constant of the ledger (`FITTED`) were written down
before anything was fitted. Changed since then, before their first row: the cases of `load` compute in float32 and
without accumulation, because bfloat16 takes hours on a CPU. Each case runs in a process of its own, with an empty
compilation cache. A case with several processes has the figures of the process with the highest peak. A case is within
the bar if the predicted peak of the whole command is within 15 % of the measured peak; --assert: 90 % of the cases are,
and none is predicted more than 10 % too low. --work: folder of runs and weights, which later calls use again.
"""

import argparse
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MIB = 2**20
# Kinds of case whose measurements may set a constant of the ledger. All other kinds only test it.
FITTED = ("report", "report_program", "train", "save", "export", "generate")
WITHIN, TOO_LOW, SHARE = 0.15, 0.10, 0.90


@dataclasses.dataclass(frozen=True)
class Case:
    """A command whose host memory is measured.

    Fields:
        name, kind: names of the case and of its kind. command: the arguments of `bytescope`; {WORK} is the folder of
        --work, and {OUT} an empty folder.
        needs: names of other cases, which run before it if they have left nothing in {WORK}.
        cpus: number of simulated CPU devices of a process. processes: number of processes.
    """

    name: str
    kind: str
    command: str
    needs: tuple[str, ...] = ()
    cpus: int = 1
    processes: int = 1


_QUIET = "--config.train.sample_tokens=0 --config.train.eval_every=0 --config.train.eval_sequences=8"
_ROWS = "--config.data.seq_len=64 --config.model.max_seq_len=64"
_500M = (
    "train tiny --config.model.d_model=1280 --config.model.n_layers=24 --config.model.n_heads=20 "
    f"--config.model.n_kv_heads=20 --config.model.d_head=64 --config.model.d_ff=3712 {_ROWS} {_QUIET} "
    "--config.train.steps=2 --config.mesh.strategy=zero3"
)
_140M = (
    "train tiny --config.model.d_model=1024 --config.model.n_layers=11 --config.model.n_heads=16 "
    f"--config.model.n_kv_heads=16 --config.model.d_head=64 --config.model.d_ff=2816 {_ROWS} {_QUIET} "
    "--config.train.steps=2"
)
_NEVER = "--config.train.checkpoint_every=1000000"

CASES = (
    Case("report_gpt2_small", "report", "report gpt2_small h200"),
    Case("report_llama_1b", "report", "report llama_1b h100:8"),
    Case("report_llama_8b", "report", "report llama_8b h100:8"),
    Case("report_tiny_cpu", "report", "report tiny cpu"),
    Case("report_moe_tiny", "report", "report tiny_moe h100:8"),
    Case("program_plain", "report_program", "report {ROOT}/tests/bench/programs/plain_jax.py:rnn h100"),
    Case("program_linen", "report_program", "report {ROOT}/tests/bench/programs/linen_models.py:gpt h100"),
    Case("report_llama_70b_64", "report_pod", "report llama_70b h100:8x8"),
    Case("report_llama_405b_512", "report_pod", "report llama_405b h100:64x8"),
    Case("report_deepseek_v3_2048", "report_pod", "report deepseek_v3 h100:256x8"),
    Case("report_mixtral_16", "report_pod", "report mixtral_8x7b h100:2x8"),
    Case("train_tiny", "train", f"train tiny --workdir={{OUT}}/run --config.train.steps=20 {_NEVER}"),
    Case("train_tiny_8", "train", f"train tiny --workdir={{OUT}}/run --config.train.steps=20 {_NEVER}", cpus=8),
    Case("train_char", "train", f"train char --workdir={{OUT}}/run --config.train.steps=3 {_QUIET} {_NEVER}"),
    Case("train_140m", "train", f"{_140M} --workdir={{OUT}}/run --config.batch.micro=8 {_NEVER}"),
    Case("train_500m_1", "train_500m", f"{_500M} --workdir={{OUT}}/run --config.batch.micro=8 {_NEVER}"),
    Case("train_500m_2", "train_500m", f"{_500M} --workdir={{OUT}}/run --config.batch.micro=4 {_NEVER}", cpus=2),
    Case("train_500m_8", "train_500m", f"{_500M} --workdir={{OUT}}/run --config.batch.micro=1 {_NEVER}", cpus=8),
    Case(
        "two_tiny", "two_processes", f"train tiny --workdir={{OUT}}/run --config.train.steps=20 {_NEVER}", processes=2
    ),
    Case(
        "two_500m",
        "two_processes",
        f"{_500M} --workdir={{OUT}}/run --config.batch.micro=4 {_NEVER}",
        processes=2,
    ),
    Case("save_tiny", "save", "train tiny --workdir={OUT}/run --config.train.steps=20"),
    Case("save_140m", "save", f"{_140M} --workdir={{WORK}}/run140m --config.batch.micro=8"),
    Case("save_500m", "save", f"{_500M} --workdir={{WORK}}/run500m --config.batch.micro=8"),
    Case("restore_140m", "restore", f"{_140M} --workdir={{COPY:run140m}} --config.batch.micro=8", ("save_140m",)),
    Case(
        "restore_140m_to_2", "restore", f"{_140M} --workdir={{COPY:run140m}} --config.batch.micro=4", ("save_140m",), 2
    ),
    Case(
        "restore_140m_to_8", "restore", f"{_140M} --workdir={{COPY:run140m}} --config.batch.micro=1", ("save_140m",), 8
    ),
    Case(
        "restore_500m_to_8", "restore", f"{_500M} --workdir={{COPY:run500m}} --config.batch.micro=1", ("save_500m",), 8
    ),
    Case(
        "restore_140m_two",
        "restore",
        f"{_140M} --workdir={{COPY:run140m}} --config.batch.micro=4",
        ("save_140m",),
        processes=2,
    ),
    Case("export_140m", "export", "export {WORK}/run140m {WORK}/folder140m", ("save_140m",)),
    Case("export_2gib", "export", "export {WORK}/run500m {WORK}/folder2gib", ("save_500m",)),
    Case("export_bf16", "export", "export {WORK}/run140m {OUT}/folder --dtype=bfloat16", ("save_140m",)),
    Case(
        "load_140m",
        "load",
        f"train hf:{{WORK}}/folder140m --workdir={{OUT}}/run {_ROWS} {_QUIET} {_NEVER} --config.train.steps=2 "
        "--config.precision.preset=fp32 --config.batch.accumulation=1 --config.batch.micro=8",
        ("export_140m",),
    ),
    Case(
        "load_2gib",
        "load",
        f"train hf:{{WORK}}/folder2gib --workdir={{OUT}}/run {_ROWS} {_QUIET} {_NEVER} --config.train.steps=2 "
        "--config.precision.preset=fp32 --config.batch.accumulation=1 --config.batch.micro=8",
        ("export_2gib",),
    ),
    Case(
        "load_2gib_to_8",
        "load",
        f"train hf:{{WORK}}/folder2gib --workdir={{OUT}}/run {_ROWS} {_QUIET} {_NEVER} --config.train.steps=2 "
        "--config.precision.preset=fp32 --config.batch.accumulation=1 --config.batch.micro=1",
        ("export_2gib",),
        cpus=8,
    ),
    Case(
        "quantize_half_gib",
        "quantize",
        "export {WORK}/folder140m {OUT}/awq --awq={WORK}/text5mb.txt --samples=8 --length=64 --dtype=float32",
        ("export_140m",),
    ),
    Case(
        "generate_140m",
        "generate",
        "generate {WORK}/run140m --prompt=def --max-tokens=20 --length=64",
        ("save_140m",),
    ),
    Case(
        "generate_folder",
        "generate",
        "generate {WORK}/folder140m --prompt=def --max-tokens=20 --length=64",
        ("export_140m",),
    ),
    Case("prepare_5mb", "prepare", "prepare --source={WORK}/text5mb.txt --out={OUT}/shards"),
    Case("prepare_200mb", "prepare", "prepare --source={WORK}/text200mb.txt --out={OUT}/shards"),
)


def write_texts(work: Path) -> None:
    """Writes the texts of the cases: pages of Python's library, repeated up to a size."""
    page = "".join(path.read_text(errors="replace") for path in sorted(Path(os.__file__).parent.glob("*.py")))
    for name, size in (("text5mb.txt", 5 * 10**6), ("text200mb.txt", 2 * 10**8)):
        if not (work / name).exists():
            (work / name).write_text((page * (size // len(page) + 1))[:size])


def run(case: Case, work: Path) -> dict[str, Any]:
    """Runs a case, after those that it needs. Returns its row: predicted and measured bytes, by phase and in all."""
    for name in case.needs:
        needed = next(other for other in CASES if other.name == name)
        if not list(work.glob(f".{name}.done")):
            run(needed, work)
    with tempfile.TemporaryDirectory(dir=work) as out:
        words = [_resolve(word, work, Path(out)) for word in case.command.split()]
        if case.kind == "save":  # a run that exists would only be verified
            shutil.rmtree(
                next(word for word in words if word.startswith("--workdir=")).split("=")[1], ignore_errors=True
            )
        if words[0] == "export" and Path(words[2]).exists():
            words.append("--force")
        children = []
        port = _free_port()
        for index in range(case.processes):
            several = []
            if case.processes > 1:
                several = [f"--coordinator=127.0.0.1:{port}", f"--process={index}", f"--processes={case.processes}"]
            command = [sys.executable, __file__, "--child", f"{out}/ledger{index}.json", *words, *several]
            with open(f"{out}/log{index}", "w") as log:
                children.append(subprocess.Popen(command, stdout=log, stderr=log, env=_environment(case), cwd=out))
        codes = [process.wait() for process in children]
        if any(code not in (0, 3) for code in codes):  # 3: the program does not fit the described device
            raise SystemExit(f"{case.name}: exit code {codes}\n{Path(out, 'log0').read_text()[-3000:]}")
        ledgers = [json.loads(Path(out, f"ledger{index}.json").read_text()) for index in range(case.processes)]
    (work / f".{case.name}.done").write_text(time.strftime("%F"))
    highest = max(ledgers, key=lambda ledger: max(ledger["measured"].values()))
    predicted: dict[str, int] = {}
    for term in highest["terms"]:
        predicted[term["phase"]] = predicted.get(term["phase"], 0) + term["bytes"]
    return {
        "case": case.name,
        "kind": case.kind,
        "fitted": case.kind in FITTED,
        "predicted": max(predicted.values(), default=0),
        "measured": max(highest["measured"].values()),
        "predicted_by_phase": predicted,
        "measured_by_phase": highest["measured"],
        "terms": highest["terms"],
    }


def _resolve(word: str, work: Path, out: Path) -> str:
    word = word.replace("{WORK}", str(work)).replace("{OUT}", str(out)).replace("{ROOT}", str(ROOT))
    if "{COPY:" in word:  # a run is continued in a copy, so that the case can be repeated
        name = word.split("{COPY:")[1].split("}")[0]
        subprocess.run(["cp", "-r", work / name, out / name], check=True)
        word = word.replace(f"{{COPY:{name}}}", str(out / name))
    return word


def _environment(case: Case) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return {
        **environment,
        "JAX_NUM_CPU_DEVICES": str(case.cpus),
        "XDG_CACHE_HOME": tempfile.mkdtemp(prefix="host-memory-cache-"),
    }


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def child(out: str, words: list[str]) -> int:
    """Runs a command in this process, and writes the ledger of its host memory."""
    from bytescope.memory import cli
    from bytescope.memory.host.host_ledger import ledger
    from bytescope.memory.records.result import plain

    code = cli.main(words)
    Path(out).write_text(json.dumps(plain(ledger())))
    return code


def show(rows: list[dict[str, Any]]) -> bool:
    """Prints the rows; returns whether the bar is met."""
    print(f"{'case':<26}{'kind':<16}{'predicted':>10}{'measured':>10}{'ratio':>7}  highest phase, MiB")
    for row in rows:
        ratio = row["predicted"] / row["measured"]
        phase = max(row["measured_by_phase"], key=lambda name: row["measured_by_phase"][name])
        kind, sizes = row["kind"] + ("" if row["fitted"] else "*"), (row["predicted"] / MIB, row["measured"] / MIB)
        print(f"{row['case']:<26}{kind:<16}{sizes[0]:>10,.0f}{sizes[1]:>10,.0f}{ratio:>7.2f}  {phase}")
    ratios = [row["predicted"] / row["measured"] for row in rows]
    within = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    low, high = min(ratios), max(ratios)
    print(f"{within} of {len(rows)} within {WITHIN:.0%}, from {low:.2f} to {high:.2f}; *: not fitted")
    return within >= SHARE * len(rows) and low >= 1 - TOO_LOW


def main() -> int:
    """Parses the command line and runs the cases."""
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases, or of kinds")
    parser.add_argument("--all", action="store_true", help="all cases")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "host-memory", help="kept folder")
    parser.add_argument("--json", type=Path, help="file of the rows; rows of other cases in it are kept")
    parser.add_argument("--assert", action="store_true", dest="check", help="fail if the bar is not met")
    args = parser.parse_args()
    if args.list:
        for case in CASES:
            print(f"{case.name:<26}{case.kind:<16}{case.command}")
        return 0
    args.work.mkdir(parents=True, exist_ok=True)
    write_texts(args.work)
    chosen = [case for case in CASES if args.all or {case.name, case.kind} & set(args.cases)]
    rows = []
    for case in chosen:
        rows.append(run(case, args.work))
        if args.json:
            kept = json.loads(args.json.read_text()) if args.json.exists() else []
            kept = [row for row in kept if row["case"] != case.name]
            args.json.write_text(json.dumps([*kept, rows[-1]], indent=1) + "\n")
        print(f"{case.name}: {rows[-1]['measured'] / MIB:,.0f} MiB measured", file=sys.stderr, flush=True)
    met = show(rows)
    return 0 if met or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
