"""The sizes of a batch: micro-batch x accumulation x data-parallel ranks = global batch."""

import dataclasses

from bytescope.memory.units import plural

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
      mode: "multisteps" (one call of the step per micro-step) or "scan" (a loop inside the step).
    """

    micro: int
    accumulation: int
    tokens: int
    mode: str


@dataclasses.dataclass(frozen=True)
class BatchAlgebra:
    """The number of sequences and tokens of an optimizer update.

    Attributes:
      micro: sequences per data-parallel rank and micro-step.
      accumulation: micro-steps per update.
      ranks: number of data-parallel ranks (data x fsdp).
      seq_len: tokens per sequence.

    Raises:
      ValueError: a number is below 1, or the accumulation is too large.
    """

    micro: int
    accumulation: int
    ranks: int
    seq_len: int

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
        """Builds the batch from the config group `batch`, of which one of `accumulation` and `tokens` may be set.

        Raises:
          ValueError: both are set, or the tokens are not a multiple of the tokens of one micro-step.
        """
        if config.tokens and config.accumulation != 1:
            raise ValueError(
                f"batch.tokens={config.tokens} and batch.accumulation={config.accumulation} cannot be combined: set "
                "only one of them, and leave the other at its default (batch.accumulation=1, batch.tokens=0)"
            )
        if config.tokens:
            return cls(
                config.micro, _count_micro_steps(config.tokens, cls(config.micro, 1, ranks, seq_len)), ranks, seq_len
            )
        return cls(config.micro, config.accumulation, ranks, seq_len)

    @property
    def rows(self) -> int:
        """Number of sequences of one micro-step over all ranks."""
        return self.micro * self.ranks

    @property
    def global_rows(self) -> int:
        """Number of sequences of an optimizer update."""
        return self.rows * self.accumulation

    @property
    def tokens(self) -> int:
        """Number of tokens of an optimizer update."""
        return self.global_rows * self.seq_len

    def __str__(self) -> str:
        return (
            f"{self.micro} micro-batch x {self.accumulation} accumulation x {self.ranks} data-parallel "
            f"= {plural(self.global_rows, 'sequence')} of {self.seq_len:,} = {self.tokens:,} tokens per update"
        )


def _count_micro_steps(tokens: int, one: BatchAlgebra) -> int:
    if tokens % one.tokens:
        below = tokens // one.tokens * one.tokens
        near = " and ".join(str(size) for size in (below, below + one.tokens) if size)
        raise ValueError(
            f"batch.tokens={tokens} is not a multiple of {one.tokens:,} tokens, the size of one micro-step "
            f"({plural(one.micro, 'sequence')} x {plural(one.ranks, 'data-parallel rank')} x {one.seq_len:,} tokens): "
            f"the nearest multiples are {near}"
        )
    return tokens // one.tokens
