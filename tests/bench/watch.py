"""What `memory.watch` costs a call: a step under it, and the same step jitted, in turns.

    python tests/bench/watch.py
    python tests/bench/watch.py --assert        # at most 20 microseconds more

The step does next to nothing, so that what is timed is the call: the seconds that the loop's thread computes, which
other work on the machine does not lengthen. The line of every hundredth call is part of it.
"""

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from bytescope.memory.watching.watched import watch

MOST_US = 20.0


def seconds(step, state, batch, calls: int) -> float:
    """Seconds that this thread computes in one call, over many of them."""
    began = time.thread_time()
    for _ in range(calls):
        state, loss = step(state, batch)
    loss.block_until_ready()
    return (time.thread_time() - began) / calls


def main() -> int:
    """Prints a line per pytree; 1 where --assert was given and a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--assert", dest="check", action="store_true", help=f"fail above {MOST_US:g} microseconds")
    args, missed = parser.parse_args(), False
    for leaves in (1, 200):
        state = [jnp.ones(4) for _ in range(leaves)]

        def step(state, batch):
            return [leaf + batch for leaf in state], batch

        plain, watched = jax.jit(step), watch(jax.jit(step), every=100, tell=lambda line: None)
        sides = [(plain, []), (watched, [])]
        for own, _ in sides:
            seconds(own, state, jnp.float32(1), 100)
        for _ in range(args.rounds):
            for own, taken in sides:
                taken.append(1e6 * seconds(own, state, jnp.float32(1), args.calls))
        jitted, under = (statistics.median(taken) for _, taken in sides)
        missed |= under - jitted > MOST_US
        print(
            f"jax {jax.__version__}, {leaves:>3} arrays: jitted {jitted:.1f} us, watched {under:.1f} us, "
            f"{under - jitted:+.1f} us a call"
        )
    return int(missed and args.check)


if __name__ == "__main__":
    sys.exit(main())
