"""Levers of speed, one at a time: the base program against each variant, in turn, in one process on one state.

    python tests/bench/speed.py --config=gpt2_small                     # every lever on the device at hand
    python tests/bench/speed.py --config=gpt2_small --levers loss gemm  # some
    python tests/bench/speed.py --config=gpt2_small --keep --json=FILE  # and what pays together, as flags
    python tests/bench/speed.py --config=gpt2_small --compile-only --target=h200    # no device: bytes, predicted s

Shown for each variant: median seconds of an update, the ratio to the base by rounds (median, lowest to highest),
tokens/s, MFU where the device's peak is known, bytes that the step allocates, seconds of compiling, and whether it
pays: a ratio below 0.99 with every round below 1. A variant that cannot run here is named with the reason. All
programs of a lever hand one state on, each donating it to the next; a program with another tree of state has it made
anew for its turn, so that a device holds one state at a time. Each program makes an update that is not timed first.

--keep starts from the base and takes the levers that pay, the best variant of each, quickest first: each is measured
again beside all that is kept so far, and stays if it still pays. --compile-only compiles each variant for a described
device and shows the seconds that are predicted of an update instead.

Ctrl-C ends the measurements and shows what is done; --json FILE is written after each lever.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from interleave import Samples, finish, parse_config, parser, random_tokens, take_turns, timed, versions
from ml_collections import ConfigDict
from ours import start, variant

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.devices.platform import simulate_devices
from bytescope.memory.seconds import step_prediction
from bytescope.train.program.program import Program, build
from bytescope.train.run.feed import calls
from bytescope.train.run.metrics import model_flops_per_token
from bytescope.train.run.startup import peak_flops

Keys = Mapping[str, Any]
SIZE, PADDED = 50257, 50304  # GPT-2's vocabulary, and as its configs have it
PAYS = 0.99  # ratio to the base below which a variant pays, if no round says otherwise


def rows(key: str, *values: Any) -> dict[str, Keys]:
    """Variants that set one key."""
    return {f"{key}={value}": {key: value} for value in values}


# lever -> label -> overrides
LEVERS: Mapping[str, Mapping[str, Keys]] = {
    "attention": rows("model.attention", "cudnn", "chunked", "naive"),
    "layers": {**rows("model.unroll", 1, 2, 4, 12), "model.scan=false": {"model.unroll": 1, "model.scan": False}},
    "loss": {**rows("loss.chunk", 1024, 4096, 8192, 16384), "loss.kind=full": {"loss.kind": "full"}},
    "logits": rows("precision.logits", "bfloat16"),
    "vocabulary": {
        f"{SIZE} padded to {multiple}": {"model.vocab_size": SIZE, "model.vocab_multiple": multiple}
        for multiple in (1, 64, 256)
    },
    "optimization": rows("xla.optimization_level", "O0", "O1", "O2", "O3"),
    "latency": rows("xla.latency_hiding", "on", "off"),
    "graphs": rows("xla.command_buffers", "off", "kernels", "loops"),
    "remat-pass": rows("remat.xla_pass", True, False),
    "gemm": rows("xla.gemm", "cublas", "triton"),
    "accumulation": rows("batch.mode", "scan", "multisteps"),
    "remat": rows("remat.policy", "none", "dots", "minimal", "dots_no_batch", "selective", "full", "auto"),
}


@dataclasses.dataclass(frozen=True)
class Side:
    """One compiled program: bytes that it allocates, whether they fit, predicted seconds of an update."""

    label: str
    program: Program
    compiled: jax.stages.Compiled
    compile_seconds: float
    allocated_bytes: int
    fits: bool | None
    predicted: float | None

    @classmethod
    def of(cls, label: str, config: ConfigDict, target: targets.Target) -> "Side":
        program = build(config, target.devices())
        began = time.perf_counter()
        done = program.compile_for_report(exact=True)
        seconds = time.perf_counter() - began
        report = report_of(done, target=target)
        found = step_prediction.predict(report.schedule, target, program.calls_per_update)
        return cls(label, program, done.compiled, seconds, report.allocated_bytes, report.fits, found and found.seconds)


class Held:
    """The one state that is on the device, and the program that left it."""

    def __init__(self) -> None:
        self.state: Any = None
        self._shapes: Any = None
        self._tokens: dict[tuple[int, ...], Any] = {}

    def take(self, program: Program) -> None:
        """Holds a state that `program` can start from: what is there, or a fresh one."""
        shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype), leaf.sharding), program.state)
        if self.state is None or shapes != self._shapes:
            self.drop()
            self.state, self._shapes = jax.block_until_ready(program.init()), shapes

    def drop(self) -> None:
        self.state = self._shapes = None

    def update(self, side: Side) -> Any:
        """One optimizer update, dispatched; its loss, perhaps still being computed."""
        batch, vocabulary = side.program.batch, side.program.model.vocab_size
        shape = (batch.global_rows, batch.seq_len, vocabulary)
        if shape not in self._tokens:
            self._tokens[shape] = random_tokens(*shape)
        tokens = next(self._tokens[shape])
        for part in calls(side.program, {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}):
            self.state, metrics = side.compiled(self.state, part)
        return metrics["loss"]

    def turn(self, side: Side) -> Callable[[int], list[float]]:
        def run(steps: int) -> list[float]:
            self.take(side.program)
            jax.block_until_ready(self.update(side))
            return timed(lambda: self.update(side), jax.block_until_ready, steps, each=jax.default_backend() == "cpu")

        return run


class Bench:
    """A base config and its variants on one target; `rows` are those of the table so far."""

    def __init__(self, config: ConfigDict, asked: Any, target: targets.Target):
        self.config, self.asked, self.target = config, asked, target
        self.held, self.rows, self.figures = Held(), [], {}
        self.best: dict[str, tuple[float, str, Keys]] = {}
        self.title = f"{asked.config}, {target.name} ({target.kind}), jax {jax.__version__}"

    def side(self, label: str, keys: Keys) -> Side:
        """The compiled program of the base with `keys`; ValueError for one that does not run or fit here."""
        if keys.get("model.vocab_size") and self.config.model.vocab_size != PADDED:
            raise ValueError(f"for configs with GPT-2's vocabulary: this has {self.config.model.vocab_size:,}")
        side = Side.of(label, variant(self.config, keys), self.target)
        if side.fits is False:
            raise ValueError(f"allocates {side.allocated_bytes / 2**30:.2f} GiB, more than the device hands out")
        return side

    def warm(self, side: Side) -> Side:
        """`side` after an update; its state is gone where it failed."""
        if not self.asked.compile_only:
            try:
                self.held.turn(side)(0)
            except Exception:
                self.held.drop()
                raise
        return side

    def lever(self, name: str, variants: Mapping[str, Keys], base: Side) -> None:
        """Measures the base beside all variants that run here, and adds their rows."""
        sides, missing = {base.label: base}, {}
        for label, keys in variants.items():
            try:
                sides[label] = self.warm(self.side(label, keys))
            except (ValueError, RuntimeError) as error:  # of our own checks, and of XLA
                missing[label] = " ".join(str(error).split())[:100]
        samples = self.times(sides) if len(sides) > 1 else {}
        for label, side in sides.items():
            if label in variants or not self.rows:
                self.add(name if label in variants else "base", side, samples, base, variants.get(label, {}))
        self.rows += [
            {**dict.fromkeys(self.columns, "-"), "lever": name, "variant": label, "pays": reason}
            for label, reason in missing.items()
        ]
        self.figures[name] = {
            label: {
                "bytes": side.allocated_bytes,
                "compile_s": side.compile_seconds,
                "predicted_s": side.predicted,
                "fits": side.fits,
                **(samples[label].to_json() if label in samples else {}),
            }
            for label, side in sides.items()
        } | {"missing": missing}

    def times(self, sides: Mapping[str, Side]) -> dict[str, Samples]:
        """Seconds of the sides in turn; nothing where nothing runs."""
        if self.asked.compile_only:
            return {}
        return take_turns(
            {label: self.held.turn(side) for label, side in sides.items()}, self.asked.rounds, self.asked.steps
        )

    @property
    def columns(self) -> Sequence[str]:
        measured = ("s", "ratio", "tokens/s", "MFU")
        return (
            "lever",
            "variant",
            *(("predicted s", "ratio") if self.asked.compile_only else measured),
            "GiB",
            "compile s",
            "pays",
        )

    def add(self, name: str, side: Side, samples: Mapping[str, Samples], base: Side, keys: Keys) -> None:
        """The row of one program."""
        row = {"lever": name, "variant": side.label}
        if side.label in samples:
            seconds, tokens = samples[side.label].median, side.program.batch.tokens
            ratio, peak = samples[side.label].over(samples[base.label]), peak_flops(side.program)
            flops = model_flops_per_token(side.program.model, side.program.batch.seq_len) * tokens
            row |= {
                "s": f"{seconds:.4f}",
                "ratio": str(ratio),
                "tokens/s": f"{tokens / seconds:,.0f}",
                "MFU": f"{100 * flops / seconds / peak / side.program.mesh.size:.1f} %" if peak else "-",
            }
            pays = keys and pays_off(ratio)
            if pays and ratio.median < self.best.get(name, (1.0,))[0]:
                self.best[name] = (ratio.median, side.label, keys)
            verdict = "" if not keys else "keep" if pays else "no"
        else:
            known = side.predicted and base.predicted
            row |= {
                "predicted s": f"{side.predicted:.4f}" if side.predicted else "-",
                "ratio": f"{side.predicted / base.predicted:.3f}" if known else "-",
            }
            verdict = "not measured"
        row = dict.fromkeys(self.columns, "-") | row
        self.rows.append(
            row
            | {
                "GiB": f"{side.allocated_bytes / 2**30:.2f}",
                "compile s": f"{side.compile_seconds:.1f}",
                "pays": verdict,
            }
        )

    def keep(self, base: Side) -> Keys:
        """The levers that pay together: each, quickest first, beside all that is kept so far."""
        kept: dict[str, Any] = {}
        for name, (_, label, keys) in sorted(self.best.items(), key=lambda item: item[1][0]):
            try:
                side = self.warm(self.side(f"{name}: {label}", {**kept, **keys}))
            except (ValueError, RuntimeError) as error:
                print(f"left out {label}: {' '.join(str(error).split())[:100]}")
                continue
            samples = self.times({base.label: base, side.label: side})
            self.add("kept so far +", side, samples, base, {**kept, **keys})
            if pays_off(samples[side.label].over(samples[base.label])):
                base, kept = side, {**kept, **keys}
        return kept

    def save(self) -> None:
        """What is known so far, to --json."""
        if self.asked.json:
            known = {"title": self.title, "rows": self.rows, "versions": versions(), "levers": self.figures}
            self.asked.json.write_text(json.dumps(known, indent=1) + "\n")

    def show(self) -> None:
        """The table of what is known, and its JSON."""
        if self.rows:
            finish(self.title, self.rows, (), {"versions": versions(), "levers": self.figures}, self.asked.json)


def pays_off(ratio: Any) -> bool:
    """Whether a variant is quicker by more than noise."""
    return ratio.median < PAYS and ratio.high < 1


def main() -> int:
    flags = parser(__doc__, rounds=7, steps=3, config="gpt2_small")
    flags.add_argument(
        "--levers", nargs="+", choices=LEVERS, default=list(LEVERS), metavar="NAME", help=f"of {', '.join(LEVERS)}"
    )
    flags.add_argument("--keep", action="store_true", help="what pays together, measured, as flags")
    flags.add_argument("--compile-only", action="store_true", help="no device: bytes and predicted seconds")
    flags.add_argument("--target", default="h200", help="with --compile-only: what for (default %(default)s)")
    asked, config, _ = parse_config(flags)
    if asked.keep and asked.compile_only:
        flags.error("--keep measures, and --compile-only does not: leave one out")
    if asked.compile_only:
        simulate_devices([asked.target])
    start()
    target = targets.to_compile_for(asked.target) if asked.compile_only else targets.parse("local")
    bench, kept = Bench(config, asked, target), {}
    try:
        base = bench.warm(bench.side("base", {}))
        for name in asked.levers:
            bench.lever(name, LEVERS[name], base)
            bench.save()
        kept = bench.keep(base) if asked.keep else {}
    except KeyboardInterrupt:
        bench.show()
        print("stopped: what was done is above", file=sys.stderr)
        return 130
    bench.show()
    if asked.keep:
        print("keep:", " ".join(f"--config.{key}={value}" for key, value in kept.items()) or "nothing pays")
    return 0


if __name__ == "__main__":
    sys.exit(main())
