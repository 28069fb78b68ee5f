"""Step time and memory of the rematerialization policies.

    python tests/bench/remat.py
    python tests/bench/remat.py --config=gpt2_small --config.batch.micro=2 --policies none dots_no_batch

The training step of configs/char.py (or --config) under the rows of model.remat.POLICIES, in turn; on a CPU
without those that offload, which it silently does not do. `custom:q,k,v,up` keeps just those names. Shown:
median seconds of an update, the ratio to the first policy by rounds, temporaries of the compiled step and
their ratio.
"""

import sys
from typing import Any

import jax
from interleave import Check, finish, mib, parse_config, parser, take_turns, versions
from ours import Trainer, compiled_bytes, start, variant

from model import POLICIES


def default_policies() -> list[str]:
    """The rows that can run as they are on this backend."""
    offload = jax.default_backend() != "cpu"
    return [name for name, row in POLICIES.items() if row is not None and (offload or not row.offloads)]


def keys(policy: str) -> dict[str, Any]:
    """The keys of the config that choose `policy`, a row or `custom:NAMES`."""
    row, _, names = policy.partition(":")
    return {"remat.policy": row, **({"remat.save": names} if names else {})}


def main() -> int:
    flags = parser(__doc__, rounds=5, steps=2, config="char")
    flags.add_argument("--policies", nargs="+", metavar="NAME",
                       help=f"of {', '.join(POLICIES)}; the first is what the others are compared with")
    asked, config, _ = parse_config(flags)
    start()
    policies = asked.policies or default_policies()
    sides = {policy: Trainer(variant(config, keys(policy))).warm_up() for policy in policies}
    samples = take_turns({name: side.turn for name, side in sides.items()}, asked.rounds, asked.steps)
    sizes = {name: compiled_bytes(side.compiled) for name, side in sides.items()}
    first = policies[0]

    def row(name: str) -> dict[str, Any]:
        return {"policy": name, "s": f"{samples[name].median:.3f}",
                "spread": f"{100 * samples[name].spread:.0f} %",
                f"to {first}": str(samples[name].over(samples[first])), "temp MiB": mib(sizes[name]["temp"]),
                f"temp to {first}": f"{sizes[name]['temp'] / sizes[first]['temp']:.2f}",
                "arguments MiB": mib(sizes[name]["arguments"]),
                "compile s": f"{sides[name].compile_seconds:.1f}"}

    checks = [Check(f"time, {name} by {first}", samples[name].over(samples[first]).median, None)
              for name in policies[1:]]
    return finish(f"remat policies on {asked.config}, jax {jax.__version__}", [row(name) for name in sides],
                  checks, {"versions": versions(), "sides": {
                      name: {**samples[name].to_json(), "bytes": sizes[name]} for name in sides}}, asked.json)


if __name__ == "__main__":
    sys.exit(main())
