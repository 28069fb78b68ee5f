"""The readers of what people write on a command line, and the command line as a reader: overrides, targets, flags."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

from support.fuzz import mutations
from support.fuzz.harness import captured

CONFIG = "tiny"


class Printed(ValueError):
    """A command told a mistake in one line of stderr and returned 2."""


def command(*words: str) -> None:
    """Runs a command line; raises Printed where it refuses, AssertionError where it does so in another way."""
    from bytescope.memory import cli

    with captured() as shown:
        code = cli.main(list(words))
        out, err = shown()
    assert code in (0, 1, 2), f"exit code {code}"
    if code == 2:
        assert err.startswith("error: ") and len(err.splitlines()) == 1, f"stderr {err!r:.200}"
        raise Printed(err.strip())
    assert out and not err, f"stderr {err!r:.200}"


def strict(value: object) -> str:
    """JSON that a browser can read; raises ValueError for NaN and Infinity."""
    return json.dumps(value, allow_nan=False)


def damaged_words(data: bytes, rng: Random) -> bytes:
    return mutations.damaged_text(data.decode(), rng).encode("utf-8", "surrogatepass")


def words(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def override_lines() -> list[bytes]:
    return [
        line.encode()
        for line in (
            "--config.model.n_layers=4",
            "--config.remat.policy=custom\n--config.remat.save=q,k",
            "--config.remat.layers=0-1:none",
            "--config.optimizer.name=adamw",
            "--config.optimizer.learning_rate=3e-4",
            "--config.model.rope_scaling=8,1.0,4.0,8192",
            "--config.mesh.fsdp=-1",
            "--config.train.steps=7",
            "--config.model.scan=false",
            "--config.xla.gemm=cublas",
            "--config.remat.budget=20GiB",
            "--config.precision.preset=bf16",
            "--config.seed=0",
            "--config.data.source=stdlib",
            "--config.model.vocab_size=256",
        )
    ]


def read_overrides(data: bytes, folder: Path) -> None:
    from bytescope.train.commands.config_arguments import split_overrides
    from bytescope.train.plan.config_factory import check_config
    from bytescope.train.program.config_files import load_flat

    _, overrides = split_overrides(words(data).split("\n"))
    check_config(CONFIG, overrides)
    strict(load_flat(CONFIG, overrides))


def read_target(data: bytes, folder: Path) -> None:
    from bytescope.memory.devices import targets

    strict(targets.parse(words(data)).to_json())


def read_words(data: bytes, folder: Path) -> None:
    """What flags hold: sizes, counts, grids, policies, levers, stages, updates. The first letter says which."""
    from bytescope.memory.compare import grids
    from bytescope.memory.devices.limits import budget_of
    from bytescope.memory.units import human, parse_bytes
    from bytescope.train.plan import levers
    from bytescope.train.plan.assumed_model import parse_count
    from bytescope.train.plan.config_grid import policy_keys
    from bytescope.train.plan.fit import fit_space
    from bytescope.train.run.profile import ProfiledUpdates

    def every_policy(text: str) -> None:
        for policy in grids.split_values(text):
            policy_keys(policy)

    readers: dict[str, Callable[[str], object]] = {
        "s": lambda text: human(parse_bytes(text)),
        "b": lambda text: budget_of(text, 2**34, "--budget"),
        "n": lambda text: f"{parse_count(text):,.0f}",
        "g": grids.parse_grid,
        "r": every_policy,
        "l": fit_space.choose_levers,
        "t": levers.choose_stages,
        "u": ProfiledUpdates.parse,
    }
    text = words(data)
    readers.get(text[:1], parse_bytes)(text[1:])


def flag_values() -> list[bytes]:
    return [
        b"s72GiB",
        b"s512 MB",
        b"s1.5tb",
        b"b10GiB",
        b"n7e9",
        b"n350m",
        b"n7_000_000",
        b"gdata.seq_len=1024,2048",
        b"gconfig=a,b",
        b"rnone,full,custom(q,k)+offload(block_in)",
        b"lremat,micro",
        b"tfp32,bf16,full",
        b"u100-103",
    ]
