"""The algebra of batches: micro-batch x accumulation x data-parallel ranks = global batch."""

import dataclasses

from ml_collections import ConfigDict

IGNORE = -1  # a target position that carries no loss


@dataclasses.dataclass(frozen=True)
class BatchAlgebra:
    """Sequences and tokens of one optimizer update.

    `micro`: sequences per data-parallel rank and micro-step; `accumulation`: micro-steps per update;
    `ranks`: data-parallel ranks (data x fsdp); `seq_len`: tokens per sequence.
    """

    micro: int
    accumulation: int
    ranks: int
    seq_len: int

    def __post_init__(self):
        for name in ("micro", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"batch.{name}={getattr(self, name)}: give 1 or more")
        if self.seq_len < 1:
            raise ValueError(f"data.seq_len={self.seq_len}: give 1 or more")

    @classmethod
    def of(cls, config: ConfigDict, ranks: int, seq_len: int) -> "BatchAlgebra":
        """From `config.batch`; `batch.tokens`, where it is given, sets the accumulation.

        Raises:
          ValueError: tokens and accumulation are both given, or the tokens do not divide over ranks and micro-batches.
        """
        if not config.tokens:
            return cls(config.micro, config.accumulation, ranks, seq_len)
        if config.accumulation != 1:
            raise ValueError(f"batch.tokens={config.tokens} and batch.accumulation={config.accumulation}: give one of "
                             "them, tokens with batch.accumulation=1 or accumulation with batch.tokens=0")
        unit = cls(config.micro, 1, ranks, seq_len).tokens
        if config.tokens % unit:
            below = config.tokens // unit * unit
            near = " and ".join(f"{tokens}" for tokens in (below, below + unit) if tokens)
            raise ValueError(f"batch.tokens={config.tokens} does not divide by {unit:,} tokens, {config.micro} "
                             f"micro-batch x {ranks} data-parallel x {seq_len:,}: the nearest that do are {near}")
        return cls(config.micro, config.tokens // unit, ranks, seq_len)

    @property
    def rows(self) -> int:
        """Sequences of one micro-step over all ranks."""
        return self.micro * self.ranks

    @property
    def global_rows(self) -> int:
        """Sequences of one optimizer update."""
        return self.rows * self.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer update."""
        return self.global_rows * self.seq_len

    def __str__(self) -> str:
        return (f"{self.micro} micro-batch x {self.accumulation} accumulation x {self.ranks} data-parallel "
                f"= {self.global_rows:,} sequences of {self.seq_len:,} = {self.tokens:,} tokens an update")
