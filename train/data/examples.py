"""Examples for fine-tuning: turns the records of `data.source` into rows of tokens, with the tokens to train on.

`open_examples` reads the records, decides which are held out, and packs rows; `read_examples` tokenizes records.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np

from bytescope.memory.units import plural
from bytescope.train.data.chat_template import CHATML, Rendered, Renderer, find_template, named_tokens, tokenizer_config
from bytescope.train.data.corpus import find
from bytescope.train.data.packing import ExampleSource
from bytescope.train.data.records import (
    CONTENTS,
    Chat,
    Malformed,
    Pair,
    RecordFiles,
    Skipped,
    choose_held_out,
    left_out,
    mark,
    read,
)
from bytescope.train.data.settings import DataConfig
from bytescope.train.data.tokenizer import ENDS, GROUP_CHARS, JsonTokenizer, Tokenizer
from bytescope.train.user_errors import UserError

AT_ONCE = 256  # number of records that are rendered and encoded together
REMEDY = (
    ": mark the text to train on with {% generation %} in your own template (data.chat_template=FILE), or set "
    "data.loss_on=all"
)
ANSWER = "qzq"  # answer of a test conversation, which shows what the template writes after an answer
# (ids [n], whether each is trained on, bool [n]); or the reason why the record has no tokens.
Tokens = tuple[np.ndarray, np.ndarray] | Malformed
# Marks before and after the number of a special token that replaces it in a message while the template is rendered.
# These Unicode noncharacters do not occur in text.
IN_MESSAGE = ("\ufdd2", "\ufdd3")


def open_examples(config: DataConfig, tokenizer: Tokenizer) -> tuple[ExampleSource, ExampleSource, str, str]:
    """Opens the examples of `config`. Returns (training rows, held-out rows, hash of the content, a one-line
    description). A row is a sequence of seq_len tokens with one or more examples.

    Raises UserError with a remedy if data are missing, malformed, or too small.
    """
    sets = [read_examples(_find(config, "source"), config, tokenizer)]
    if config.eval_source:
        sets.append(read_examples(_find(config, "eval_source"), config, tokenizer))
        held_out = np.flatnonzero(sets[1].named if sets[1].named.any() else ~sets[1].named)
        trained = ~sets[0].named if not sets[0].named.all() else np.ones_like(sets[0].named)
    else:
        chosen = choose_held_out(sets[0].marks, sets[0].named)
        trained, held_out = ~chosen, np.flatnonzero(chosen)
    kept = trained & ~np.isin(sets[0].marks, sets[-1].marks[held_out])
    copies = int(trained.sum() - kept.sum())
    parts = (
        _source(sets[0], np.flatnonzero(kept), config, tokenizer),
        _source(sets[-1], held_out, config, tokenizer),
    )
    notes = "; ".join(left_out(sum(one.malformed for one in sets), copies))
    for part, what in zip(parts, ("train on", "hold out"), strict=True):
        if not len(part):
            raise UserError(
                f"data.source={config.source!r} has no example to {what} that contains a token to train on"
                f"{f' ({notes})' if notes else ''}: give more records, raise data.seq_len if answers begin after "
                "data.seq_len tokens, or set data.eval_source"
            )
    return *parts, _fingerprint(config, tokenizer, sets, parts), _describe(config, tokenizer, sets, parts, copies)


def _find(config: DataConfig, key: str) -> RecordFiles:
    source = getattr(config, key)
    files = find(source, f"data.{key}")
    if not isinstance(files, RecordFiles):
        raise UserError(
            f"data.{key}={source!r} has no records, which data.format={config.format} needs: give "
            ".jsonl, .jsonl.gz or .parquet files, or a folder saved by datasets"
        )
    return files


def _source(examples: ExampleSet, chosen: np.ndarray, config: DataConfig, tokenizer: Tokenizer) -> ExampleSource:
    return ExampleSource(
        examples.tokens,
        examples.learned,
        examples.starts,
        chosen,
        seq_len=config.seq_len,
        packing=config.packing,
        vocab_size=tokenizer.vocab_size,
    )


def _fingerprint(
    config: DataConfig, tokenizer: Tokenizer, sets: Sequence[ExampleSet], parts: Sequence[ExampleSource]
) -> str:
    how = (config.format, config.loss_on, config.packing, config.too_long, config.special_tokens)
    digest = blake2b(repr((tokenizer.identity, how)).encode(), digest_size=8)
    for one in sets:
        for array in (one.tokens, one.learned, one.starts, one.marks):
            digest.update(np.ascontiguousarray(array).data)
    for part in parts:
        digest.update(np.ascontiguousarray(part.order).data)
    return digest.hexdigest()


def _describe(
    config: DataConfig, tokenizer: Tokenizer, sets: Sequence[ExampleSet], parts: Sequence[ExampleSource], copies: int
) -> str:
    notes = [f"{tokenizer.name}, vocabulary {tokenizer.vocab_size:,}"]
    if config.format == "chat":
        notes.append(f"chat template of {find_template(tokenizer, config.chat_template).title}")
    elif not end_of_text(tokenizer):
        notes.append("no token ends a completion (the tokenizer has no end-of-text token)")
    if config.special_tokens == "parse":
        notes.append("special tokens written in the text are parsed")
    for count, what in (
        (sum(one.cut for one in sets), f"longer than {config.seq_len:,} tokens cut at the end"),
        (sum(one.dropped for one in sets), f"longer than {config.seq_len:,} tokens dropped"),
        (sum(one.unlearned for one in sets), "without a token to train on left out"),
    ):
        if count:
            notes.append(f"{plural(count, 'example')} {what}")
    train, held_out = parts
    held_out_source = f" of {config.eval_source}" if config.eval_source else ""
    rows = f"{'packed into' if config.packing else 'in'} {plural(len(train), 'row')}"
    notes += left_out(sum(one.malformed for one in sets), copies)
    return (
        f"{config.source}: {_counts(train)}, {rows} of {config.seq_len:,} ({100 * train.filled:.1f} % filled); "
        f"held out {_counts(held_out)}{held_out_source}; {'; '.join(notes)}"
    )


def _counts(part: ExampleSource) -> str:
    return f"{plural(part.examples, 'example')}, {plural(part.tokens, 'token')}, {part.learned:,} trained on"


@dataclass(frozen=True)
class ExampleSet:
    """The examples of a source, concatenated.

    Attributes:
      tokens: token ids of all examples, unsigned [t].
      learned: True for each token to train on, bool [t].
      starts: index of the first token of each example, then t, int64 [n + 1].
      marks: hash of each example's content, uint64 [n].
      named: True for examples in files whose name marks them as held out, bool [n].
      cut: number of examples that were too long and were cut at the end.
      dropped: number of examples that were too long and were left out.
      unlearned: number of examples that were left out because they have no token to train on.
      malformed: number of examples that were left out because they are malformed.
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
    """Reads all records of `files` as examples in the format `config.format`, and tokenizes them.

    Raises UserError if a file cannot be read, too many records are malformed, or the chat template cannot be used.
    """
    skipped, counts = Skipped(config.skip_bad), {"cut": 0, "dropped": 0, "unlearned": 0}
    tokens: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    rows: list[tuple[int, bool]] = []
    tokens_of = TOKENS_OF[config.format](config, tokenizer)
    contents = _read_contents(files, config.format, skipped)
    while chunk := list(islice(contents, AT_ONCE)):
        encoded = tokens_of([content for _, _, content in chunk])
        for (place, named, content), example in zip(chunk, encoded, strict=True):
            if isinstance(example, Malformed):
                skipped.add(place, example)
                continue
            # Tokens after the last trained one do not change any gradient.
            end = int(np.flatnonzero(example[1])[-1]) + 1 if example[1].any() else 0
            ids, targets = example[0][:end], example[1][:end]
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


def _read_contents(files: RecordFiles, name: str, skipped: Skipped) -> Iterator[tuple[str, bool, Any]]:
    fields, content_of = CONTENTS[name]
    for record in read(files, fields, skipped):
        try:
            yield record.place, record.held_out, content_of(record.values)
        except Malformed as error:
            skipped.add(record.place, error)


def _pair_tokenizer(config: DataConfig, tokenizer: Tokenizer) -> Callable[[Sequence[Pair]], list[Tokens]]:
    """Returns a function from pairs of prompt and completion to tokens. For each pair, the function returns (token ids
    [n], True for each token to train on [n]), or the error `Malformed`.

    The tokens are the tokenizer's begin token, if it has one, the prompt, the completion and an end token. By default,
    only the completion and the end token are trained on.
    """
    begin, end = tokenizer.around[0], end_of_text(tokenizer)

    def join(pair: Pair, prompt: np.ndarray, ids: np.ndarray) -> Tokens:
        if not np.array_equal(ids[: len(prompt)], prompt):
            return Malformed(
                "the end of the prompt and the beginning of the completion become one token: move a space "
                "at the end of the prompt to the completion"
            )
        before = begin if tuple(ids[: len(begin)]) != begin else ()
        behind = end if tuple(ids[len(ids) - len(end) :]) != end else ()
        joined = np.concatenate([np.array(before, ids.dtype), ids, np.array(behind, ids.dtype)])
        return joined, np.arange(len(joined)) >= (len(before) + len(prompt) if config.loss_on == "assistant" else 0)

    def tokens_of(pairs: Sequence[Pair]) -> list[Tokens]:
        prompts = tokenizer.encode_many([pair.prompt for pair in pairs])
        texts = tokenizer.encode_many([pair.prompt + pair.completion for pair in pairs])
        return [join(*row) for row in zip(pairs, prompts, texts, strict=True)]

    return tokens_of


def end_of_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the id of the token that ends a text, as a tuple of one id, or () if there is none.

    It is the end token in tokenizer_config.json. If there is none, it is the token that the tokenizer itself appends,
    or else a token with a common name such as <|endoftext|>.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return () if tokenizer.separator is None else (tokenizer.separator,)
    names = [named_tokens(tokenizer_config(tokenizer)).get("eos_token"), *ENDS]
    ids = [tokenizer.id_of(name) for name in names if name]
    named = ids[0] if names[0] else None
    if named is None and tokenizer.around[1]:
        return tokenizer.around[1]
    return next(((i,) for i in (named, *ids) if i is not None), ())


def _chat_tokenizer(config: DataConfig, tokenizer: Tokenizer) -> Callable[[Sequence[Chat]], list[Tokens]]:
    """Returns a function from conversations to tokens, which renders conversations with the chat template and tokenizes
    the text.

    For each conversation, the function returns (token ids [n], True for each token to train on [n]), or the error
    `Malformed`.
    """
    template = find_template(tokenizer, config.chat_template)
    guard = (
        SpecialTokenGuard(tokenizer)
        if isinstance(tokenizer, JsonTokenizer) and config.special_tokens == "text"
        else None
    )
    parsing = tokenizer.parsing() if isinstance(tokenizer, JsonTokenizer) else tokenizer
    begin = tokenizer.around[0] if template.source == CHATML else ()  # other templates write the begin token themselves
    everything = config.loss_on == "all"
    renderer = Renderer(template)
    by_prefix = not everything and not template.marks_answers
    turn_end = _turn_end(renderer, tokenizer) if by_prefix else ""

    def mark_tokens(text: Rendered, ids: np.ndarray, spans: np.ndarray, before: Sequence[np.ndarray]) -> Tokens:
        try:
            learned = _find_answers(text, ids, before, turn_end) if by_prefix else text.learned
        except Malformed as error:
            return error
        inside = np.zeros(len(ids), bool)
        for start, stop in learned:
            inside |= (spans[:, 1] > start) & (spans[:, 0] < stop)
        if begin and tuple(ids[: len(begin)]) != begin:
            ids, inside = np.concatenate([np.array(begin, ids.dtype), ids]), np.append([False] * len(begin), inside)
        return ids, inside | everything

    def guarded(guard: SpecialTokenGuard, text: Rendered) -> Tokens:
        try:
            (ids, spans), *before = guard.encode_spans([text.text, *text.before])
        except UserError as error:  # this tokenizer cannot encode special tokens as text
            return Malformed(str(error))
        return mark_tokens(text, ids, spans, [prefix for prefix, _ in before])

    def tokens_of(chats: Sequence[Chat]) -> list[Tokens]:
        safe = [guard.protect(chat) for chat in chats] if guard else chats
        texts = [renderer.render(chat, before=by_prefix, up_to=by_prefix and not turn_end) for chat in safe]
        plain = [
            text
            for chat, same, text in zip(chats, safe, texts, strict=True)
            if chat is same and isinstance(text, Rendered)
        ]
        encoded = _encode_in_groups(parsing.encode_spans, [text.text for text in plain])
        prefixes = _encode_in_groups(parsing.encode_many, [prefix for text in plain for prefix in text.before])
        tokens: list[Tokens] = []
        for chat, same, text in zip(chats, safe, texts, strict=True):
            if isinstance(text, Malformed):
                tokens.append(text)
            elif guard is None or chat is same:
                ids, spans = next(encoded)
                tokens.append(mark_tokens(text, ids, spans, [next(prefixes) for _ in text.before]))
            else:
                tokens.append(guarded(guard, text))
        return tokens

    return tokens_of


def _encode_in_groups(encode: Callable[[Sequence[str]], list[Any]], texts: Sequence[str]) -> Iterator[Any]:
    group, chars = [], 0
    for text in texts:
        group.append(text)
        chars += len(text)
        # Such a group is large enough to use all CPU cores, and small enough to limit memory.
        if chars >= GROUP_CHARS:
            yield from encode(group)
            group, chars = [], 0
    yield from encode(group)


def _turn_end(renderer: Renderer, tokenizer: Tokenizer) -> str:
    """Returns the special token that the chat template writes after an answer, or "" if it writes none."""
    probe = Chat([{"role": "user", "content": "u"}, {"role": "assistant", "content": ANSWER}], None)
    rendered = renderer.render(probe, before=True, up_to=False)
    if isinstance(rendered, Malformed) or not rendered.text.startswith(rendered.before[0]):
        return ""
    behind = rendered.text[len(rendered.before[0]) :].rpartition(ANSWER)[2]
    ends = {behind.find(token): token for token in sorted(tokenizer.special, key=len) if token in behind}
    return ends[min(ends)] if ends else ""


def _find_answers(
    text: Rendered, ids: np.ndarray, before: Sequence[np.ndarray], turn_end: str
) -> list[tuple[int, int]]:
    """Finds the assistant's answers in a rendered conversation. Returns the span [from, to) of characters of each
    answer, including the token that ends it.

    Args:
      text: the rendered conversation.
      ids: token ids of the whole conversation.
      before: for each answer, the token ids of the prompt that generation would use: the conversation up to the answer.
      turn_end: the special token that ends an answer, or "" if the template writes none.

    Raises Malformed if the conversation does not begin with exactly this prompt, in characters and in token ids,
    because the model would then be trained on other tokens than it gets in generation.
    """
    spans: list[tuple[int, int]] = []
    for number, (prompt, prefix) in enumerate(zip(text.before, before, strict=True)):
        if not text.text.startswith(prompt) or (spans and len(prompt) < spans[-1][1]):
            raise Malformed(
                "the chat template changes the text before an answer if messages follow the answer" + REMEDY
            )
        if not np.array_equal(ids[: len(prefix)], prefix):
            raise Malformed("the tokenizer splits the text before an answer differently if the answer follows" + REMEDY)
        if turn_end:
            stop = text.text.find(turn_end, len(prompt)) + len(turn_end)
            known = stop >= len(turn_end)
        else:
            stop, known = len(text.up_to[number]), text.text.startswith(text.up_to[number])
        if not known:
            raise Malformed("the chat template does not show where an answer ends" + REMEDY)
        spans.append((len(prompt), stop))
    return spans


# data.format -> function that returns a function from contents to their tokens.
TOKENS_OF: dict[str, Callable[[DataConfig, Tokenizer], Callable[[Sequence[Any]], list[Tokens]]]] = {
    "chat": _chat_tokenizer,
    "pairs": _pair_tokenizer,
}


class SpecialTokenGuard:
    """Makes special tokens in messages ordinary text, so that a message that contains <|im_end|> does not end its
    turn.

    Call `protect` before the chat template is rendered; it replaces special tokens in messages. Then call
    `encode_spans` on the rendered text; it encodes the replaced tokens as ordinary text.
    """

    def __init__(self, tokenizer: JsonTokenizer):
        self._names = sorted(tokenizer.special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._either = re.compile(f"{IN_MESSAGE[0]}([0-9]+){IN_MESSAGE[1]}|({self._pattern.pattern})")
        self._tokenizer = tokenizer
        self._renamed: tuple[JsonTokenizer, dict[str, str]] | None = None

    def protect(self, chat: Chat) -> Chat:
        """Returns the conversation with the special tokens in its messages replaced. A conversation without any is
        returned unchanged.
        """
        protected = dataclasses.replace(chat, messages=self._replaced(chat.messages), tools=self._replaced(chat.tools))
        return chat if protected == chat else protected

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda m: f"{IN_MESSAGE[0]}{self._names.index(m[0])}{IN_MESSAGE[1]}", value)
        if isinstance(value, list):
            return [self._replaced(one) for one in value]
        if isinstance(value, dict):
            return {key: self._replaced(one) for key, one in value.items()}
        return value

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (token ids [n], span [from, to) of the characters of each token, int64 [n, 2]) for each rendered
        text. Special tokens that `protect` replaced are encoded as ordinary text.
        """
        tokenizer, names = self._renamed = self._renamed or self._tokenizer.renamed()
        encoded = []
        for text in texts:
            written, begins, ends = [], [], []  # encoded text, and for each of its characters the span in `text`
            at = 0
            for match in self._either.finditer(text):
                part = text[at : match.start()]
                into = self._names[int(match[1])] if match[1] else names[match[2]]
                written += [part, into]
                begins += [*range(at, match.start()), *[match.start()] * len(into)]
                ends += [*range(at + 1, match.start() + 1), *[match.end()] * len(into)]
                at = match.end()
            written.append(text[at:])
            begins += range(at, len(text))
            ends += range(at + 1, len(text) + 1)
            ((ids, spans),) = tokenizer.encode_spans(["".join(written)])
            places = []
            for first, stop in spans.tolist():
                if first < stop:
                    places.append((begins[first], ends[stop - 1]))
                else:  # a token of no characters
                    place = begins[first] if first < len(begins) else len(text)
                    places.append((place, place))
            encoded.append((ids, np.array(places, np.int64).reshape(-1, 2)))
        return encoded
