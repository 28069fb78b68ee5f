"""One row of accuracy.py, frontier.py and test_peak.py in a process of its own: a peak never goes back.

    python tests/gpu/child.py '{"config": "tiny", "keys": {"batch.micro": "2"}, "steps": 2}'

Builds the trainer's program, compiles it, predicts, and with "steps" runs so many updates on random tokens the way the
loop does (train/run/loop.py): the next batches are put on the device while an update runs, metrics are read one update
late. The last line printed is the answer, a JSON object; a line for each update goes to stderr.

Keys of the request: config, keys (config key -> text), target (default local), steps (0: compile only), others
(whether to compile the other programs of a run), gate (a file: compile while others compile, run the steps alone), keep
(a file for the report of the step), trace (a folder: two more updates are profiled, after the peak was read).
"""

import contextlib
import fcntl
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.devices.platform import choose_platform

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
# Beside what is used, the pool of pinned memory may hold as much again; see memory/devices/platform.py.
HOST_ROOM = 0.9
PROFILED = 2  # updates


def predict(asked: Mapping[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """(answer so far, program, compiled step); a config that cannot run gives ({"cannot": why}, None, None)."""
    from bytescope.memory.analysis import report_of
    from bytescope.memory.devices import targets
    from bytescope.train.plan import run_memory
    from bytescope.train.program.config_files import load
    from bytescope.train.program.program import build

    target = targets.parse(asked.get("target", "local"))
    try:
        program = build(load(asked["config"], list(asked.get("keys", {}).items())), target.devices()[:1])
        began = time.perf_counter()
        compilation = program.compile_for_report(exact=True)
    except ValueError as error:
        return {"cannot": " ".join(str(error).split())}, None, None
    answer = {"compile_s": time.perf_counter() - began}
    report = report_of(compilation, target=target, loop=run_memory.loop_overhead(program), seconds=True)
    if asked.get("keep"):
        Path(asked["keep"]).write_text(json.dumps(report.to_json()))
    others = run_memory.peaks(program, run_memory.other_programs(program)) if asked.get("others") else {}
    sizes = {"step": report.predicted_bytes, **others}
    most = max(sizes, key=sizes.__getitem__)
    answer |= {
        "allocated": report.allocated_bytes,
        "predicted": sizes[most],
        "program": most,
        "programs": sizes,
        "runtime_overheads": [
            {"name": row.name, "bytes": row.bytes, "where": row.where} for row in report.runtime_overheads
        ],
        "host": report.host_bytes,
        "limit": report.limit_bytes,
        "fits": sizes[most] <= report.limit_bytes,
        "parameters": _parameters(program),
        "tokens": program.batch.tokens,
        "calls": program.calls_per_update,
        "prediction": report.prediction,
        "device": target.kind,
        "platform": target.platform,
        "versions": dict(report.versions),
    }
    return answer, program, compilation.compiled


def _parameters(program: Any) -> int:
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(program.state.params))


def obstacle(answer: Mapping[str, Any]) -> str:
    """Why a program that is predicted should not be run here, "" for none."""
    from bytescope.memory.host.node_memory import free_host_bytes

    room = int(HOST_ROOM * free_host_bytes())
    if not answer["fits"]:
        return f"does not fit: {answer['predicted'] / 2**30:.2f} GiB of {answer['limit'] / 2**30:.2f}"
    if answer["host"] > room:
        return f"host memory: {answer['host'] / 2**30:.1f} GiB of {room / 2**30:.1f} that are free"
    return ""


def tokens_for(program: Any) -> Iterator[dict[str, Any]]:
    """Endless host batches as the trainer's reader gives them: int32 [rows, L] inputs and targets."""
    from interleave import random_tokens

    rows = program.batch.global_rows
    for tokens in random_tokens(rows, program.batch.seq_len, program.config.model.vocab_size):
        yield {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}


def run(program: Any, compiled: Any, steps: int, trace: str = "") -> dict[str, Any]:
    """What `steps` updates took: bytes, seconds of each (the first two hold what the first call does once), losses.

    trace: a folder for the profile of two more updates, "" for none.
    """
    import jax
    from interleave import forget_peak, peak_resident

    from bytescope.memory.devices import live
    from bytescope.memory.host.process_memory import release_free_memory
    from bytescope.train.run.feed import feed

    device = jax.local_devices()[0]
    release_free_memory()
    before = live.sample(device)
    state, batches = jax.block_until_ready(program.init()), feed(program, tokens_for(program))
    release_free_memory()
    forget_peak()  # of the process: what compiling `init` took
    pending, losses, seconds, began = None, [], [], time.perf_counter()
    for _ in range(steps):
        for batch in (micro_batches := next(batches)):
            state, metrics = compiled(state, batch)
        if pending is not None:
            began = _done(pending, losses, seconds, began)
        pending = metrics
    _done(pending, losses, seconds, began)
    jax.block_until_ready(state)
    del micro_batches
    seen = live.sample(device)
    host = seen.source == "host"
    stats = device.memory_stats() or {}
    if trace:
        with jax.profiler.trace(trace):
            for _ in range(PROFILED):
                for batch in next(batches):
                    state, metrics = compiled(state, batch)
            jax.block_until_ready((state, metrics))
    return {
        "losses": losses,
        "seconds": seconds,
        "source": seen.source,
        "measured": peak_resident() - before.host_rss_bytes if host else seen.peak_bytes,
        "before": None if host else before.peak_bytes,
        "pool": stats.get("pool_bytes"),
        "card": seen.card_used_bytes,
        "host_peak": seen.host_peak_rss_bytes,
    }


def _done(metrics: Mapping[str, Any], losses: list[float], seconds: list[float], began: float) -> float:
    losses.append(float(metrics["loss"]))
    now = time.perf_counter()
    seconds.append(now - began)
    print(f"update {len(losses)}: loss {losses[-1]:.4f}, {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    return now


@contextlib.contextmanager
def locked(gate: str, how: int) -> Iterator[None]:
    """Holds a lock of the file `gate`, shared or exclusive (fcntl.LOCK_SH, fcntl.LOCK_EX); none for ""."""
    if not gate:
        yield
        return
    with open(gate) as file:
        fcntl.flock(file, how)
        yield


def main() -> None:
    asked = json.loads(sys.argv[1])
    gate = asked.get("gate", "")
    choose_platform(fraction=0.92)
    with locked(gate, fcntl.LOCK_SH):
        answer, program, compiled = predict(asked)
    if program is not None and asked.get("steps"):
        with locked(gate, fcntl.LOCK_EX):
            why = obstacle(answer)
            answer |= {"skipped": why} if why else run(program, compiled, asked["steps"], asked.get("trace", ""))
        if gate:  # NVML counts all processes
            answer["card"] = None
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
