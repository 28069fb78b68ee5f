"""Records to examples: the tokens of each, and which of them are learned."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from bytescope.train.data.chat_template import CHATML, Rendered, Renderer, find_template, named_tokens, tokenizer_config
from bytescope.train.data.example_content import CONTENTS, Chat, Pair
from bytescope.train.data.records import Malformed, RecordFiles, Skipped, mark, read
from bytescope.train.data.settings import DataConfig
from bytescope.train.data.special_tokens import Guard
from bytescope.train.data.tokenizer import ENDS, GROUP_CHARS, JsonTokenizer, Tokenizer
from bytescope.train.user_errors import UserError

AT_ONCE = 256  # records rendered and encoded together
REMEDY = (
    "; mark what is learned with {% generation %} in a template of your own (data.chat_template=FILE), or set "
    "data.loss_on=all"
)
ANSWER = "qzq"  # of a conversation that shows what the template writes behind an answer
# ids [n] and whether each is learned, bool [n]; or why there are none.
Tokens = tuple[np.ndarray, np.ndarray] | Malformed


@dataclass(frozen=True)
class ExampleSet:
    """Examples one after the other. tokens: unsigned [t]; learned: bool [t]; starts: int64 [n + 1].

    marks: uint64 [n], of the contents. named: bool [n], whether the file's name says that it is held out. The rest
    counts examples: cut at the end, dropped as too long, left out without a learned token, or as malformed.
    """

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    marks: np.ndarray
    named: np.ndarray
    cut: int
    dropped: int
    unlearned: int
    malformed: int


def read_examples(files: RecordFiles, config: DataConfig, tokenizer: Tokenizer) -> ExampleSet:
    """Reads all records of `files` as `config.format` has them. Raises UserError as `records.read` does, and for a
    template that cannot be used."""
    skipped, counts = Skipped(config.skip_bad), {"cut": 0, "dropped": 0, "unlearned": 0}
    tokens: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    rows: list[tuple[int, bool]] = []
    with TOKENS_OF[config.format](config, tokenizer) as tokens_of:
        contents = _contents(files, config.format, skipped)
        while chunk := list(islice(contents, AT_ONCE)):
            for (place, named, content), found in zip(chunk, tokens_of([row[2] for row in chunk]), strict=True):
                if isinstance(found, Malformed):
                    skipped.add(place, found)
                    continue
                end = int(np.flatnonzero(found[1])[-1]) + 1 if found[1].any() else 0
                ids, targets = found[0][:end], found[1][:end]  # what follows changes no gradient
                if len(ids) > config.seq_len + 1:
                    counts["cut" if config.too_long == "cut" else "dropped"] += 1
                    if config.too_long == "drop":
                        continue
                    # Copies, because a slice would keep the whole example in memory.
                    ids, targets = ids[: config.seq_len + 1].copy(), targets[: config.seq_len + 1].copy()
                if not targets[1:].any():
                    counts["unlearned"] += 1
                    continue
                tokens.append(ids)
                learned.append(targets)
                rows.append((mark(content.key()), named))
    skipped.refuse_nothing_left(files.title, len(rows) + counts["dropped"] + counts["unlearned"])
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    return ExampleSet(
        np.concatenate([np.array([], dtype), *tokens]),
        np.concatenate([np.array([], bool), *learned]),
        np.cumsum([0, *map(len, tokens)]),
        np.array([row[0] for row in rows], np.uint64),
        np.array([row[1] for row in rows], bool),
        malformed=skipped.count,
        **counts,
    )


def _contents(files: RecordFiles, name: str, skipped: Skipped) -> Iterator[tuple[str, bool, Any]]:
    """(place, whether the file is held out, content) of each record."""
    fields, content_of = CONTENTS[name]
    for record in read(files, fields, skipped):
        try:
            yield record.place, record.held_out, content_of(record.values)
        except Malformed as error:
            skipped.add(record.place, error)


@contextlib.contextmanager
def _pair_tokens(config: DataConfig, tokenizer: Tokenizer) -> Iterator[Callable[[Sequence[Pair]], list[Tokens]]]:
    """Gives (pairs) -> tokens: prompt, completion, the token that ends a text; one that begins it where the tokenizer
    puts it. The completion and its end are learned."""
    begin, end = tokenizer.around[0], end_of_text(tokenizer)

    def of(pair: Pair, prompt: np.ndarray, ids: np.ndarray) -> Tokens:
        if not np.array_equal(ids[: len(prompt)], prompt):
            return Malformed(
                "the end of the prompt and the beginning of the completion become one token: move a blank "
                "at the end of the prompt to the completion"
            )
        before = begin if tuple(ids[: len(begin)]) != begin else ()
        behind = end if tuple(ids[len(ids) - len(end) :]) != end else ()
        joined = np.concatenate([np.array(before, ids.dtype), ids, np.array(behind, ids.dtype)])
        return joined, np.arange(len(joined)) >= (len(before) + len(prompt) if config.loss_on == "assistant" else 0)

    def tokens_of(pairs: Sequence[Pair]) -> list[Tokens]:
        prompts = tokenizer.encode_many([pair.prompt for pair in pairs])
        texts = tokenizer.encode_many([pair.prompt + pair.completion for pair in pairs])
        return [of(*row) for row in zip(pairs, prompts, texts, strict=True)]

    yield tokens_of


def end_of_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The id that ends a text: as tokenizer_config.json says, else what the tokenizer puts there itself, else the token
    whose name says so; () if there is none."""
    if not isinstance(tokenizer, JsonTokenizer):
        return () if tokenizer.separator is None else (tokenizer.separator,)
    names = [named_tokens(tokenizer_config(tokenizer)).get("eos_token"), *ENDS]
    ids = [tokenizer.id_of(name) for name in names if name]
    named = ids[0] if names[0] else None
    if named is None and tokenizer.around[1]:
        return tokenizer.around[1]
    return next(((i,) for i in (named, *ids) if i is not None), ())


@contextlib.contextmanager
def _chat_tokens(config: DataConfig, tokenizer: Tokenizer) -> Iterator[Callable[[Sequence[Chat]], list[Tokens]]]:
    """Gives (conversations) -> tokens, of the text that the chat template makes of each."""
    template = find_template(tokenizer, config.chat_template)
    guard = Guard(tokenizer) if isinstance(tokenizer, JsonTokenizer) and config.special_tokens == "text" else None
    parsing = tokenizer.parsing() if isinstance(tokenizer, JsonTokenizer) else tokenizer
    begin = tokenizer.around[0] if template.source == CHATML else ()  # other templates write it where they want it
    everything = config.loss_on == "all"
    with Renderer(template) as renderer:
        by_prefix = not everything and not template.marks_answers
        turn_end = _turn_end(renderer, tokenizer) if by_prefix else ""

        def of(text: Rendered, ids: np.ndarray, spans: np.ndarray, before: Sequence[np.ndarray]) -> Tokens:
            try:
                learned = _answers(text, ids, before, turn_end) if by_prefix else text.learned
            except Malformed as error:
                return error
            inside = np.zeros(len(ids), bool)
            for start, stop in learned:
                inside |= (spans[:, 1] > start) & (spans[:, 0] < stop)
            if begin and tuple(ids[: len(begin)]) != begin:
                ids, inside = np.concatenate([np.array(begin, ids.dtype), ids]), np.append([False] * len(begin), inside)
            return ids, inside | everything

        def guarded(guard: Guard, text: Rendered) -> Tokens:
            try:
                (ids, spans), *before = guard.encode_spans([text.text, *text.before])
            except UserError as error:  # this tokenizer cannot tell them apart
                return Malformed(str(error))
            return of(text, ids, spans, [prefix for prefix, _ in before])

        def tokens_of(chats: Sequence[Chat]) -> list[Tokens]:
            safe = [guard.protect(chat) for chat in chats] if guard else chats
            texts = renderer.render(safe, before=by_prefix, up_to=by_prefix and not turn_end)
            plain = [
                text
                for chat, same, text in zip(chats, safe, texts, strict=True)
                if chat is same and isinstance(text, Rendered)
            ]
            encoded = _in_groups(parsing.encode_spans, [text.text for text in plain])
            prefixes = _in_groups(parsing.encode_many, [prefix for text in plain for prefix in text.before])
            found: list[Tokens] = []
            for chat, same, text in zip(chats, safe, texts, strict=True):
                if isinstance(text, Malformed):
                    found.append(text)
                elif guard is None or chat is same:
                    ids, spans = next(encoded)
                    found.append(of(text, ids, spans, [next(prefixes) for _ in text.before]))
                else:
                    found.append(guarded(guard, text))
            return found

        yield tokens_of


def _in_groups(encode: Callable[[Sequence[str]], list[Any]], texts: Sequence[str]) -> Iterator[Any]:
    """Yields the encoding of each text. Texts are encoded in groups of about GROUP_CHARS characters: enough to keep
    every core busy, few enough to bound the memory."""
    group, chars = [], 0
    for text in texts:
        group.append(text)
        chars += len(text)
        if chars >= GROUP_CHARS:
            yield from encode(group)
            group, chars = [], 0
    yield from encode(group)


def _turn_end(renderer: Renderer, tokenizer: Tokenizer) -> str:
    """The special token that the template puts behind an answer; "" if it puts none."""
    probe = Chat([{"role": "user", "content": "u"}, {"role": "assistant", "content": ANSWER}], None)
    (found,) = renderer.render([probe], before=True, up_to=False)
    if isinstance(found, Malformed) or not found.text.startswith(found.before[0]):
        return ""
    behind = found.text[len(found.before[0]) :].rpartition(ANSWER)[2]
    ends = {behind.find(token): token for token in sorted(tokenizer.special, key=len) if token in behind}
    return ends[min(ends)] if ends else ""


def _answers(text: Rendered, ids: np.ndarray, before: Sequence[np.ndarray], turn_end: str) -> list[tuple[int, int]]:
    """[from, to) of the characters of each answer and of the token that ends its turn.

    What comes before an answer is rendered as it is for generation, and must be the beginning of the whole, in text and
    in ids: else the model would be trained on other tokens than it is asked with. Raises Malformed if it is not.
    """
    found: list[tuple[int, int]] = []
    for number, (prompt, prefix) in enumerate(zip(text.before, before, strict=True)):
        if not text.text.startswith(prompt) or (found and len(prompt) < found[-1][1]):
            raise Malformed("what the chat template writes before an answer changes with what follows" + REMEDY)
        if not np.array_equal(ids[: len(prefix)], prefix):
            raise Malformed("the beginning of an answer and what comes before it become one token" + REMEDY)
        if turn_end:
            stop = text.text.find(turn_end, len(prompt)) + len(turn_end)
            known = stop >= len(turn_end)
        else:
            stop, known = len(text.up_to[number]), text.text.startswith(text.up_to[number])
        if not known:
            raise Malformed("where an answer ends cannot be told from the chat template" + REMEDY)
        found.append((len(prompt), stop))
    return found


# data.format -> a context with (contents) -> their tokens.
TOKENS_OF: dict[str, Callable[[DataConfig, Tokenizer], contextlib.AbstractContextManager]] = {
    "chat": _chat_tokens,
    "pairs": _pair_tokens,
}
