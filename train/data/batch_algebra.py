"""The sizes of a batch: micro-batch x accumulation x data-parallel ranks = global batch."""

import dataclasses
import re

import jax
import jax.numpy as jnp

IGNORE = -1  # target of a position without loss
MAX_ACCUMULATION = 2**20  # maximum micro-steps per update


def batch_names(*, examples: bool, packing: bool, experts: bool) -> tuple[str, ...]:
    """Returns the names of the arrays of a batch. Each array is int32 [..., B, L].

    The array `segments` exists if rows contain several packed examples. It numbers the examples of a row from 1; 0
    marks padding at the end. The array `mask` exists if each row contains one example and the model has experts. It is
    1 for a token and 0 for padding.

    Args:
      examples: True if rows contain examples, False if they are windows of a text.
      packing: the config value `data.packing`.
      experts: True if the model has experts.
    """
    if not examples:
        return "inputs", "targets"
    if packing:
        return "inputs", "targets", "segments"
    return ("inputs", "targets", "mask") if experts else ("inputs", "targets")


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The config group `batch`.

    Attributes:
      micro: sequences per data-parallel rank and micro-step.
      accumulation: micro-steps per optimizer update.
      tokens: tokens per update, from which the accumulation is computed; 0 if not set.
      accumulation_schedule: update:accumulation pairs, such as ("0:1", "1000:4"); () for a constant accumulation.
      mode: "multisteps" (one call of the step per micro-step) or "scan" (a loop inside the step).
    """

    micro: int
    accumulation: int
    tokens: int
    accumulation_schedule: tuple[str, ...]
    mode: str


@dataclasses.dataclass(frozen=True)
class BatchAlgebra:
    """The number of sequences and tokens of an optimizer update.

    Attributes:
      micro: sequences per data-parallel rank and micro-step.
      accumulation: micro-steps per update; if there is a schedule, the maximum.
      ranks: number of data-parallel ranks (data x fsdp).
      seq_len: tokens per sequence.
      schedule: the value of batch.accumulation_schedule as pairs (first update, micro-steps per update from this
        update on). It is () if all updates have `accumulation` micro-steps.

    Raises:
      ValueError: a number is below 1, or the accumulation is too large.
    """

    micro: int
    accumulation: int
    ranks: int
    seq_len: int
    schedule: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        for name in ("micro", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"batch.{name}={getattr(self, name)} is too small: give 1 or more")
        if self.seq_len < 1:
            raise ValueError(f"data.seq_len={self.seq_len} is too small: give 1 or more")
        if self.accumulation > MAX_ACCUMULATION:
            raise ValueError(
                f"{self.accumulation} micro-steps per update (batch.accumulation) are too many: give at most "
                f"{MAX_ACCUMULATION}, with a larger batch.micro"
            )

    @classmethod
    def from_config(cls, config: BatchConfig, ranks: int, seq_len: int) -> "BatchAlgebra":
        """Builds the batch from the config group `batch`, of which one of `accumulation`, `tokens` and
        `accumulation_schedule` may be set.

        Raises:
          ValueError: more than one of them is set, the tokens are not a multiple of the tokens of one micro-step, or
            the accumulation schedule is not valid or needs another `batch.mode`.
        """
        given = [
            f"batch.{name}={getattr(config, name)}"
            for name, default in (("tokens", 0), ("accumulation_schedule", ()), ("accumulation", 1))
            if getattr(config, name) != default
        ]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} cannot be combined: set only one of them, and leave the others at their "
                "defaults (batch.accumulation=1, batch.tokens=0, batch.accumulation_schedule=())"
            )
        if config.tokens:
            return cls(
                config.micro, _count_micro_steps(config.tokens, cls(config.micro, 1, ranks, seq_len)), ranks, seq_len
            )
        schedule = _parse_schedule(config.accumulation_schedule)
        if schedule and config.mode == "scan":
            raise ValueError(
                f"{given[0]} cannot be combined with batch.mode=scan, which compiles a fixed number of micro-steps "
                "into the step: set batch.mode=multisteps"
            )
        largest = max((count for _, count in schedule), default=config.accumulation)
        return cls(config.micro, largest, ranks, seq_len, schedule)

    @property
    def rows(self) -> int:
        """Number of sequences of one micro-step over all ranks."""
        return self.micro * self.ranks

    @property
    def global_rows(self) -> int:
        """Number of sequences of an optimizer update. If updates differ in size, this is the number of sequences of
        the largest update.
        """
        return self.rows * self.accumulation

    @property
    def tokens(self) -> int:
        """Number of tokens of an optimizer update. If updates differ in size, this is the number of tokens of the
        largest update.
        """
        return self.global_rows * self.seq_len

    def at(self, update: int) -> int:
        """Returns the number of micro-steps of an update. The first update is number 0."""
        return next((count for start, count in reversed(self.schedule) if update >= start), self.accumulation)

    def traced_at(self, update: jax.Array) -> jax.Array:
        """Returns the number of micro-steps of the update whose number is the traced array `update`, int32.
        optax.MultiSteps calls this function.
        """
        if not self.schedule:
            return jnp.full_like(update, self.accumulation)
        starts = jnp.asarray([start for start, _ in self.schedule], jnp.int32)
        counts = jnp.asarray([count for _, count in self.schedule], jnp.int32)
        return counts[jnp.searchsorted(starts, update, side="right") - 1]

    def tokens_at(self, update: int) -> int:
        """Returns the number of tokens of update number `update`."""
        return self.rows * self.at(update) * self.seq_len

    def rows_before(self, update: int) -> int:
        """Returns the total number of sequences of the updates before number `update`."""
        bounds = [(start, count) for start, count in self.schedule or ((0, self.accumulation),) if start < update]
        ends = [*(start for start, _ in bounds[1:]), update]
        return self.rows * sum(count * (end - start) for (start, count), end in zip(bounds, ends))

    @property
    def read_steps(self) -> int:
        """Number of micro-steps whose sequences the data reader delivers as one batch: all micro-steps of an update. It
        is 1 if a schedule changes their number, because all batches of a reader have the same size.
        """
        return 1 if self.schedule else self.accumulation

    def __str__(self) -> str:
        if self.schedule:
            counts = [count for _, count in self.schedule]
            steps = ", ".join(f"{count} from update {start:,}" for start, count in self.schedule)
            fewest = self.tokens // self.accumulation * min(counts)
            return (
                f"{self.micro} micro-batch x accumulation {steps} x {self.ranks} data-parallel, sequences of "
                f"{self.seq_len:,} = {fewest:,} to {self.tokens:,} tokens per update"
            )
        return (
            f"{self.micro} micro-batch x {self.accumulation} accumulation x {self.ranks} data-parallel "
            f"= {self.global_rows:,} sequences of {self.seq_len:,} = {self.tokens:,} tokens per update"
        )


def _count_micro_steps(tokens: int, one: BatchAlgebra) -> int:
    if tokens % one.tokens:
        below = tokens // one.tokens * one.tokens
        near = " and ".join(str(size) for size in (below, below + one.tokens) if size)
        raise ValueError(
            f"batch.tokens={tokens} is not a multiple of {one.tokens:,} tokens, the size of one micro-step "
            f"({one.micro} sequences x {one.ranks} data-parallel ranks x {one.seq_len:,} tokens): "
            f"the nearest multiples are {near}"
        )
    return tokens // one.tokens


def _parse_schedule(texts: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    matches = [re.fullmatch(r"(\d+):(\d+)", str(text)) for text in texts]
    pairs = tuple((int(match[1]), int(match[2])) for match in matches if match)
    starts = [start for start, _ in pairs]
    if any(number >= 2**31 for pair in pairs for number in pair):  # updates and micro-steps are int32 on a device
        raise ValueError(
            f"batch.accumulation_schedule={','.join(map(str, texts))} has a number that is too large for int32: "
            f"give numbers below {2**31}"
        )
    if not all(matches) or starts != sorted(set(starts)) or starts[:1] not in ([], [0]) or not all(n for _, n in pairs):
        raise ValueError(
            f"batch.accumulation_schedule={','.join(map(str, texts))} is not a valid schedule: write "
            "UPDATE:ACCUMULATION pairs in order of the updates, the first from update 0, such as 0:1,1000:4"
        )
    return pairs
