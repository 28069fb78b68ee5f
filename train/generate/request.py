"""A request for tokens, and the state of a request while it is answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and the settings for generating its answer.

    Fields:
      tokens: token ids of the prompt, at least one.
      most: maximum number of new tokens.
      stops: token ids that end the answer and are not part of it.
      temperature: sampling temperature; 0 takes the most likely token.
      top_k, top_p: sampling filters; the values 0 and 1 switch them off.
      seed: random seed, 0 to 2**32 - 1.
    """

    tokens: tuple[int, ...]
    most: int = 64
    stops: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclasses.dataclass
class Running:
    """A request that is waiting or is being answered.

    Fields:
      number: index of the request in the order of submission.
      request: the prompt and the sampling settings.
      tokens: token ids of the prompt and of the answer so far.
      pages: KV cache pages of the computed tokens.
      computed: number of tokens whose keys and values are in the KV cache.
      ended: why the answer ended: "stop" (a stop token) or "length" (the maximum number of new tokens); "" if it has
        not ended.
    """

    number: int
    request: Request
    tokens: list[int]
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    ended: str = ""

    @property
    def answer(self) -> Sequence[int]:
        """Token ids of the answer so far, without a stop token at the end."""
        generated = self.tokens[len(self.request.tokens) :]
        return generated[:-1] if self.ended == "stop" else generated

    @property
    def missing(self) -> int:
        """Number of tokens whose keys and values are not computed yet."""
        return len(self.tokens) - self.computed

    def take(self, token: int) -> None:
        """Appends a generated token to the answer. Sets `ended` if it is a stop token or the answer has its maximum
        length.
        """
        self.tokens.append(token)
        if token in self.request.stops:
            self.ended = "stop"
        elif len(self.tokens) - len(self.request.tokens) >= self.request.most:
            self.ended = "length"
