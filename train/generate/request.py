"""A request for tokens, and its state while it is answered."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bytescope.train.generate.generate_flags import MAX_TOKENS

if TYPE_CHECKING:
    from bytescope.train.generate.model_source import Source


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how its answer is to be generated.

    Fields:
      tokens: ids of the prompt, at least one. most: max new tokens. stops: ids that end the answer, which leaves them
      out. temperature: 0 for the most likely token. top_k, top_p, min_p: filters; 0, 1 and 0 for none. seed: of the
      sampling, 0 to 2**32 - 1.
    """

    tokens: tuple[int, ...]
    most: int = 64
    stops: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclasses.dataclass
class Running:
    """A request that waits or is being answered.

    Fields:
      number: its place among all requests. tokens: ids of the prompt and of the answer so far. pages: pages with the
      keys and values of its first `computed` tokens. known: number of full pages that other requests may share.
      ended: why the answer ended: "stop", a stop token; "text", a stop string, or the caller; "length", the max new
      tokens; "" while it goes on.
    """

    number: int
    request: Request
    tokens: list[int]
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    known: int = 0
    ended: str = ""

    @property
    def answer(self) -> Sequence[int]:
        """The generated tokens without a stop token."""
        made = self.tokens[len(self.request.tokens) :]
        return made[:-1] if self.ended == "stop" else made

    @property
    def missing(self) -> int:
        """Number of tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    def take(self, token: int) -> None:
        """Adds the token that follows, and says whether that is the end."""
        self.tokens.append(token)
        if token in self.request.stops:
            self.ended = "stop"
        elif len(self.tokens) - len(self.request.tokens) >= self.request.most:
            self.ended = "length"


def make_request(args: argparse.Namespace, tokens: tuple[int, ...], source: Source, seed: int | None = None) -> Request:
    """Returns the request that a command's flags make to `source` for a prompt."""
    max_tokens = args.max_tokens or max(min(MAX_TOKENS, (args.length or source.length) - len(tokens)), 1)
    return Request(
        tokens,
        max_tokens,
        frozenset() if args.ignore_end else source.ends,
        args.temperature,
        args.top_k,
        args.top_p,
        args.min_p,
        args.seed if seed is None else seed,
    )
