"""Step time and memory of the rematerialization policies.

    python tests/bench/remat.py
    python tests/bench/remat.py --config=gpt2_small --config.batch.micro=2 --policies none dots_no_batch

The training step of configs/char.py (or --config) under the rows of model.remat.policies.POLICIES, in turn; on a CPU
without those that offload, which it silently does not do. `custom:q,k,v,up` keeps just those names. Shown:
median seconds of an update, the ratio to the first policy by rounds, temporaries of the compiled step and
their ratio. Checked against the first: the leanest policy of those no slower than --best-time-below (1.05) times it
takes at most --best-temp-below (0.6) of its temporaries, and `full` at most --full-time-below (1.4) of its time;
exit code 1 if not.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax
from interleave import Check, finish, mib, parse_config, parser, take_turns, versions
from ours import Trainer, compiled_bytes, start, variant

from bytescope.model import POLICIES


def default_policies() -> list[str]:
    """The rows that can run as they are on this backend."""
    offload = jax.default_backend() != "cpu"
    return [name for name, row in POLICIES.items() if row is not None and (offload or not row.offloads)]


def keys(policy: str) -> dict[str, Any]:
    """The keys of the config that choose `policy`, a row or `custom:NAMES`."""
    row, _, names = policy.partition(":")
    return {"remat.policy": row, "remat.save": names, "remat.offload": ""}  # not the names of the config's own


# option -> (limit, what it is held against)
LIMITS = {
    "best-time": (1.05, "time of the best policy by the first's (default %(default)s)"),
    "best-temp": (0.6, "temporaries of the best policy by the first's (default %(default)s)"),
    "full-time": (1.4, "time of `full` by the first's (default %(default)s)"),
}


def promises(
    first: str, time: Mapping[str, float], temp: Mapping[str, float], limits: Mapping[str, Any]
) -> list[Check]:
    """What is held against `limits`: the leanest of the policies that are quick enough, the quickest if none is."""
    if not time:
        return []
    quick = [name for name in time if time[name] <= limits["best_time_below"]] or [min(time, key=time.__getitem__)]
    best = min(quick, key=temp.__getitem__)
    checks = [
        Check(f"temp, {best} (best) by {first}", temp[best], limits["best_temp_below"]),
        Check(f"time, {best} (best) by {first}", time[best], limits["best_time_below"]),
    ]
    if "full" in time:
        checks.append(Check(f"time, full by {first}", time["full"], limits["full_time_below"]))
    return checks


def main() -> int:
    flags = parser(__doc__, rounds=5, steps=2, config="char")
    flags.add_argument(
        "--policies",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(POLICIES)}; the first is what the others are compared with",
    )
    for name, (default, text) in LIMITS.items():
        flags.add_argument(f"--{name}-below", type=float, default=default, metavar="X", help=text)
    asked, config, _ = parse_config(flags)
    start()
    policies = asked.policies or default_policies()
    sides = {policy: Trainer(variant(config, keys(policy))).warm_up() for policy in policies}
    samples = take_turns({name: side.turn for name, side in sides.items()}, asked.rounds, asked.steps)
    sizes = {name: compiled_bytes(side.compiled) for name, side in sides.items()}
    first = policies[0]

    def row(name: str) -> dict[str, Any]:
        return {
            "policy": name,
            "s": f"{samples[name].median:.3f}",
            "spread": f"{100 * samples[name].spread:.0f} %",
            f"to {first}": str(samples[name].over(samples[first])),
            "temp MiB": mib(sizes[name]["temp"]),
            f"temp to {first}": f"{sizes[name]['temp'] / sizes[first]['temp']:.2f}",
            "arguments MiB": mib(sizes[name]["arguments"]),
            "compile s": f"{sides[name].compile_seconds:.1f}",
        }

    time = {name: samples[name].over(samples[first]).median for name in policies[1:]}
    temp = {name: sizes[name]["temp"] / sizes[first]["temp"] for name in policies[1:]}
    checks = promises(first, time, temp, vars(asked))
    return finish(
        f"remat policies on {asked.config}, jax {jax.__version__}",
        [row(name) for name in sides],
        checks,
        {"versions": versions(), "sides": {name: {**samples[name].to_json(), "bytes": sizes[name]} for name in sides}},
        asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
