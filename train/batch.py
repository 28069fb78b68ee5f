"""The algebra of batches: micro-batch x accumulation x data-parallel ranks = global batch."""

import dataclasses

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
