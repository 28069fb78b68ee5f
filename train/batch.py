"""The algebra of batches: micro-batch x accumulation x data-parallel ranks = global batch."""

import dataclasses
import re

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

IGNORE = -1  # a target position that carries no loss


@dataclasses.dataclass(frozen=True)
class BatchAlgebra:
    """Sequences and tokens of one optimizer update.

    `micro`: sequences per data-parallel rank and micro-step; `accumulation`: micro-steps per update, with a schedule
    the most of any; `ranks`: data-parallel ranks (data x fsdp); `seq_len`: tokens per sequence; `schedule`: pairs
    (update, its micro-steps and those of the updates after it), () for `accumulation` throughout.
    """

    micro: int
    accumulation: int
    ranks: int
    seq_len: int
    schedule: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        for name in ("micro", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"batch.{name}={getattr(self, name)}: give 1 or more")
        if self.seq_len < 1:
            raise ValueError(f"data.seq_len={self.seq_len}: give 1 or more")

    @classmethod
    def of(cls, config: ConfigDict, ranks: int, seq_len: int) -> "BatchAlgebra":
        """From `config.batch`: the accumulation as it is, by `tokens`, or by `accumulation_schedule`.

        Raises:
          ValueError: two of these are given, the tokens do not divide over ranks and micro-batches, or the schedule is
            none, or cannot be had in this mode.
        """
        given = [f"batch.{name}={config[name]}" for name, default in
                 (("tokens", 0), ("accumulation_schedule", ()), ("accumulation", 1)) if config[name] != default]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: give one of them; the others are 1 for batch.accumulation, 0 for "
                             "batch.tokens and () for batch.accumulation_schedule")
        if config.tokens:
            return cls(config.micro, _divide(config.tokens, cls(config.micro, 1, ranks, seq_len)), ranks, seq_len)
        schedule = _parse(config.accumulation_schedule)
        if schedule and config.mode == "scan":
            raise ValueError(f"{given[0]} with batch.mode=scan: that compiles one number of micro-steps into the step; "
                             "set batch.mode=multisteps")
        most = max((count for _, count in schedule), default=config.accumulation)
        return cls(config.micro, most, ranks, seq_len, schedule)

    @property
    def rows(self) -> int:
        """Sequences of one micro-step over all ranks."""
        return self.micro * self.ranks

    @property
    def global_rows(self) -> int:
        """Sequences of one optimizer update, with a schedule the most."""
        return self.rows * self.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer update, with a schedule the most."""
        return self.global_rows * self.seq_len

    def at(self, update: int) -> int:
        """Micro-steps of update number `update`, counted from 0."""
        return next((count for start, count in reversed(self.schedule) if update >= start), self.accumulation)

    def traced_at(self, update: jax.Array) -> jax.Array:
        """The same for a traced number, int32: what `optax.MultiSteps` asks."""
        if not self.schedule:
            return jnp.full_like(update, self.accumulation)
        starts, counts = (jnp.asarray(column, jnp.int32) for column in zip(*self.schedule))
        return counts[jnp.searchsorted(starts, update, side="right") - 1]

    def tokens_at(self, update: int) -> int:
        """Tokens of update number `update`."""
        return self.rows * self.at(update) * self.seq_len

    def rows_before(self, update: int) -> int:
        """Sequences of all updates before number `update`."""
        bounds = [(start, count) for start, count in self.schedule or ((0, self.accumulation),) if start < update]
        ends = [*(start for start, _ in bounds[1:]), update]
        return self.rows * sum(count * (end - start) for (start, count), end in zip(bounds, ends))

    @property
    def read_steps(self) -> int:
        """Micro-steps whose sequences are read at once: an update's, or one where updates differ."""
        return 1 if self.schedule else self.accumulation

    def __str__(self) -> str:
        if self.schedule:
            counts = [count for _, count in self.schedule]
            told = ", ".join(f"{count} from update {start:,}" for start, count in self.schedule)
            least = self.tokens // self.accumulation * min(counts)
            return (f"{self.micro} micro-batch x accumulation {told} x {self.ranks} data-parallel, sequences of "
                    f"{self.seq_len:,} = {least:,} to {self.tokens:,} tokens an update")
        return (f"{self.micro} micro-batch x {self.accumulation} accumulation x {self.ranks} data-parallel "
                f"= {self.global_rows:,} sequences of {self.seq_len:,} = {self.tokens:,} tokens an update")


def _divide(tokens: int, one: BatchAlgebra) -> int:
    """Micro-steps that make `tokens`, from the batch of one."""
    if tokens % one.tokens:
        below = tokens // one.tokens * one.tokens
        near = " and ".join(str(size) for size in (below, below + one.tokens) if size)
        raise ValueError(f"batch.tokens={tokens} does not divide by {one.tokens:,} tokens, {one.micro} micro-batch x "
                         f"{one.ranks} data-parallel x {one.seq_len:,}: the nearest that do are {near}")
    return tokens // one.tokens


def _parse(texts: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """`("0:1", "1000:4")` as pairs of numbers. Raises ValueError for anything that is no schedule."""
    matches = [re.fullmatch(r"(\d+):(\d+)", str(text)) for text in texts]
    pairs = tuple((int(match[1]), int(match[2])) for match in matches if match)
    starts = [start for start, _ in pairs]
    if not all(matches) or starts != sorted(set(starts)) or starts[:1] not in ([], [0]) or not all(n for _, n in pairs):
        raise ValueError(f"batch.accumulation_schedule={','.join(map(str, texts))}: write UPDATE:ACCUMULATION from "
                         "update 0 on, in order, such as 0:1,1000:4")
    return pairs
