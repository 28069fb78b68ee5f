"""What can befall a training run: a row of KINDS each, which strikes a `Life` and notes what went wrong."""

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from end_to_end.lives import Life, Start


def _strike(life: Life, start: Start) -> None:
    """Kills one of the processes; the others end by themselves."""
    start.send(signal.SIGKILL, life.rng.randrange(life.processes))
    # jax aborts those whom the news does not reach first.
    life.expect(start, -signal.SIGKILL, *((5, -signal.SIGABRT) if life.processes > 1 else ()))


def kill_starting(life: Life) -> None:
    """SIGKILL while it imports, compiles or restores."""
    start = life.begin()
    deadline = time.monotonic() + life.rng.uniform(0.05, 1.0) * life.ground.start_s
    while time.monotonic() < deadline and "\nstep " not in start.text():
        time.sleep(0.02)
    _strike(life, start)


def kill_stepping(life: Life) -> bool:
    """SIGKILL some milliseconds after a row."""
    start = life.train(life.rng.randint(1, 9))
    if start is None:
        return False
    time.sleep(life.rng.uniform(0, 0.05))
    _strike(life, start)
    return True


def kill_evaluating(life: Life) -> bool:
    """SIGKILL after the row before an evaluation."""
    due = max(life.saved(), default=0)
    start = life.train(10 - due % 10 or 10)
    if start is None:
        return False
    time.sleep(life.rng.uniform(0, 0.03))
    _strike(life, start)
    return True


def kill_saving(life: Life) -> bool:
    """SIGKILL while a checkpoint is being written."""
    start = life.train(life.rng.randint(1, 4))
    if start is None:
        return False
    unfinished = life.workdir / "checkpoints"
    if not start.until(lambda: any(unfinished.glob("*.orbax-checkpoint-tmp"))):
        return False
    time.sleep(life.rng.uniform(0, 0.02))
    _strike(life, start)
    return True


def _stop(*names: str) -> Callable[[Life], bool]:
    """Signals at a random row, some of them to one process and some to another."""
    numbers = [signal.Signals[name] for name in names]

    def stop(life: Life) -> bool:
        start = life.train(life.rng.randint(1, 9))
        if start is None:
            return False
        for number in numbers:
            time.sleep(life.rng.uniform(0, 0.2))
            start.send(number, life.rng.randrange(life.processes))
        life.expect(start, 0, *((130,) if "SIGINT" in names[1:] else ()))
        told = any(words in start.text() for words in ("saved step ", f"{life.ground.steps}/{life.ground.steps}"))
        if 130 not in start.codes() and not told:
            life.wrong.append(f"it did not say what it saved: {start.text()[-400:]}")
        return True

    return stop


def signals_at_the_end(life: Life) -> bool:
    """Two signals from the last update on: during the last evaluation, the last save, the sample, the end."""
    due = max(life.saved(), default=0)
    start = life.train(life.ground.steps - due - life.rng.randint(0, 2))
    if start is not None:
        for number in life.rng.choice(((signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT))):
            time.sleep(life.rng.uniform(0, 0.4))
            start.send(number)
        life.expect(start, 0, 130)
    return start is not None


def stopped_for_a_while(life: Life) -> bool:
    """One of the processes stands still: it is named, and the run goes on when it does."""
    start = life.train(life.rng.randint(1, 9))
    if start is None:
        return False
    index = life.rng.randrange(life.processes)
    start.send(signal.SIGSTOP, index)
    named = f"process {index} has been silent for "
    if not start.until(lambda: named in start.text()):
        life.wrong.append(f"process {index} stood still and was not named: {start.text()[-600:]}")
    start.send(signal.SIGCONT, index)
    start.send(signal.SIGTERM, index)
    life.expect(start, 0)
    return True


WORDS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b'["hello", 1, 2, "guess"]\n',
    b'["hello", 9, 9]\n',
    b'["end", 2, "over"]\n',
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\0" * 5000,
    b"[" * 5000 + b"\n",
)


def strangers(life: Life) -> bool:
    """Connections of others at the coordinator's port, from the first moment on: some of them stay and say nothing."""
    start, more, open_ones = life.begin(), life.rng.randint(1, 9), []

    def knock() -> bool:
        with contextlib.suppress(OSError):
            stranger = socket.create_connection(("127.0.0.1", start.port), timeout=1)
            open_ones.append(stranger)
            stranger.sendall(life.rng.choice(WORDS))
        for old in open_ones[:-20]:
            old.close()
        del open_ones[:-20]
        time.sleep(0.02)
        return life.reached(start, more)

    struck = start.until(knock)
    for stranger in open_ones:
        stranger.close()
    life.proceed(start, struck)
    if struck:
        start.send(signal.SIGTERM)
        life.expect(start, 0)
    return struck


def second_training(life: Life) -> bool:
    """Another start in the same directory: it is refused, and the first one goes on."""
    first = life.train(2)
    if first is None:
        return False
    first.send(signal.SIGSTOP)  # so that it does not come to its end meanwhile; it holds the directory all the same
    second = Start(life)
    life.expect(second, 2)
    first.send(signal.SIGCONT)
    if f"is in use by process {first.processes[0].pid} on " not in second.text():
        life.wrong.append(f"the second training was not told of the first: {second.text()[-400:]}")
    first.send(signal.SIGTERM)
    life.expect(first, 0)
    return True


def file_limit(life: Life) -> None:
    """Every file may have so many bytes and no more, as with a quota."""
    size = life.rng.randint(40_000, 160_000)
    start = life.begin(file_limit=size)
    life.expect(start, 0, 2)


def full_disk(life: Life) -> None:
    """A disk with little room left; there is room again for the next start."""
    disk = life.workdir.parent
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    left = life.rng.randint(0, 700_000)
    with contextlib.suppress(OSError), open(filler, "wb") as file:
        file.write(b"\0" * max(free - left, 0))
    try:
        start = life.begin()
        life.expect(start, 0, 2)
        if start.processes[0].returncode == 2 and "No space left on device" not in start.text():
            life.wrong.append(f"a full disk was not named: {start.text()[-400:]}")
    finally:
        filler.unlink(missing_ok=True)


DAMAGES: dict[str, Callable[[random.Random, bytes], bytes | None]] = {
    "half": lambda rng, content: content[: len(content) // 2],
    "empty": lambda rng, content: b"",
    "flipped": lambda rng, content: _flipped(rng, content),
    "zeros": lambda rng, content: bytes(len(content)),
    "another": lambda rng, content: b'["something else"]',
    "gone": lambda rng, content: None,
}


def _flipped(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content or b"x")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def damage(rng: random.Random, path: Path) -> None:
    """Damages a file in one of the ways."""
    after = DAMAGES[rng.choice(sorted(DAMAGES))](rng, path.read_bytes())
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after)


def damaged_checkpoint(life: Life) -> bool:
    """A file of the newest checkpoint."""
    if not life.saved():
        return False
    newest = life.saved()[-1]
    files = sorted(path for path in (life.workdir / "checkpoints" / str(newest)).rglob("*") if path.is_file())
    damage(life.rng, life.rng.choice(files))
    life.doubt(newest)
    return True


def damaged_rows(life: Life) -> bool:
    """The end of metrics.jsonl, behind the rows up to the newest checkpoint."""
    path = life.workdir / "metrics.jsonl"
    if not path.exists():
        return False
    good = max(life.saved(), default=0)
    lines = path.read_bytes().splitlines(keepends=True)
    late = [line for line in lines if b'"step": ' in line and int(line.split(b'"step": ')[1].split(b",")[0]) > good]
    kept = lines[: len(lines) - len(late)] if life.rng.random() < 0.5 else lines
    ends = (
        b'{"step": 9',
        b"\0" * 300,
        b"[]\nnull\n17\n",
        b'{"step": "x", "eval_loss": null}\n',
        b"\xff\xfe\xfd",
        b'{"step": 100000, "loss": 0.1}\n',
    )
    path.write_bytes(b"".join(kept) + life.rng.choice(ends))
    return True


def damaged_config(life: Life) -> bool:
    """config.json of the run: refused in a line; restored, the run goes on."""
    path = life.workdir / "config.json"
    if not path.exists():
        return False
    whole = path.read_bytes()
    while path.exists() and path.read_bytes() == whole:
        path.write_bytes(
            life.rng.choice(
                (
                    b"",
                    b"{",
                    b"null",
                    b"[]",
                    b"{}",
                    bytes(200),
                    whole[:-200],
                    whole.replace(b'"config"', b'"confi"'),
                    b'{"config": 1}',
                )
            )
        )
    start = life.begin()
    life.expect(start, 2)
    if "config.json is damaged" not in start.text():
        life.wrong.append(f"a damaged config.json was not named: {start.text()[-400:]}")
    path.write_bytes(whole)
    return True


def damaged_cache(life: Life) -> bool:
    """Compiled programs of the cache."""
    entries = sorted(life.ground.cache.glob("*-cache"))
    for path in life.rng.sample(entries, min(3, len(entries))):
        with contextlib.suppress(FileNotFoundError):  # another life may have found it
            damage(life.rng, path)
    return bool(entries)


def leftovers(life: Life) -> None:
    """What a kill at the worst moment leaves: half files beside the real ones, and a lock that nobody holds."""
    folder = life.workdir / "checkpoints" / f"{life.newest() + 1}.orbax-checkpoint-tmp"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "half").write_bytes(bytes(100))
    for name in ("config.json.tmp", "metrics.jsonl.tmp", "memory.json.tmp", "run.lock"):
        (life.workdir / name).write_bytes(b'{"pid": 1, "ho')


def another_mesh(life: Life) -> None:
    """From now on the run has other devices."""
    life.devices = life.rng.choice([count for count in (1, 2, 4) if count != life.devices])


KINDS: dict[str, Callable[[Life], bool | None]] = {
    "killed while it starts": kill_starting,
    "killed in a step": kill_stepping,
    "killed in an evaluation": kill_evaluating,
    "killed in a save": kill_saving,
    "SIGTERM": _stop("SIGTERM"),
    "SIGINT": _stop("SIGINT"),
    "SIGHUP": _stop("SIGHUP"),
    "two signals": _stop("SIGTERM", "SIGINT"),
    "two interrupts": _stop("SIGINT", "SIGINT"),
    "two signals at the end": signals_at_the_end,
    "a second training": second_training,
    "no file over a limit": file_limit,
    "full disk": full_disk,
    "damaged checkpoint": damaged_checkpoint,
    "damaged metrics.jsonl": damaged_rows,
    "damaged config.json": damaged_config,
    "damaged compile cache": damaged_cache,
    "leftovers": leftovers,
    "another mesh": another_mesh,
    "one of two killed": kill_stepping,
    "one of two killed in a save": kill_saving,
    "strangers at the port": strangers,
    "one of two stopped for a while": stopped_for_a_while,
    "one of two told to stop": _stop("SIGTERM"),
    "two of two told to stop": _stop("SIGHUP", "SIGTERM"),
}
