"""A request for tokens, and the state of a request while it is answered."""

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
    """A prompt and the settings for generating its answer.

    Fields:
      tokens: token ids of the prompt, at least one.
      most: maximum number of new tokens.
      stops: ids that end the answer; the answer does not contain them.
      temperature: sampling temperature; 0 takes the most likely token.
      top_k, top_p, min_p: sampling filters; 0, 1 and 0 switch them off.
      seed: random seed, 0 to 2**32 - 1.
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
    """A request that is waiting or being answered.

    Fields:
      number: number of the request in order of submission.
      tokens: token ids of the prompt and of the answer so far.
      pages: KV cache pages with the keys and values of its first `computed` tokens.
      known: number of full pages that other requests may share.
      ended: why the answer ended: "stop" (a stop token), "text" (a stop string, or the caller), "length" (the maximum
        number of new tokens); "" while it is running.
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
        """The generated tokens, without a stop token at the end."""
        generated = self.tokens[len(self.request.tokens) :]
        return generated[:-1] if self.ended == "stop" else generated

    @property
    def missing(self) -> int:
        """Number of tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    def take(self, token: int) -> None:
        """Adds the next token; sets `ended` if the token ends the answer."""
        self.tokens.append(token)
        if token in self.request.stops:
            self.ended = "stop"
        elif len(self.tokens) - len(self.request.tokens) >= self.request.most:
            self.ended = "length"


def make_request(args: argparse.Namespace, tokens: tuple[int, ...], source: Source, seed: int | None = None) -> Request:
    """Returns the request for a prompt with the settings of the command's flags."""
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
