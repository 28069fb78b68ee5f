"""The examples of `data.source`, parted into what trains and what is held out, in rows."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from bytescope.train.data.chat_template import find_template
from bytescope.train.data.corpus import find
from bytescope.train.data.example_reader import ExampleSet, end_of_text, read_examples
from bytescope.train.data.packing import ExampleSource
from bytescope.train.data.records import RecordFiles, choose_held_out, left_out
from bytescope.train.data.settings import DataConfig
from bytescope.train.data.tokenizer import Tokenizer
from bytescope.train.user_errors import UserError


def open_examples(config: DataConfig, tokenizer: Tokenizer) -> tuple[ExampleSource, ExampleSource, str, str]:
    """What trains, what is held out, the fingerprint of both, and a line for people.

    Raises UserError, one line with the remedy, if something is missing, malformed, or too small.
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
    notes = "; ".join(left_out(sum(found.malformed for found in sets), copies))
    for part, what in zip(parts, ("train on", "hold out"), strict=True):
        if not len(part):
            raise UserError(
                f"data.source={config.source!r} holds no example to {what} with a learned token"
                f"{f' ({notes})' if notes else ''}: give more, raise data.seq_len if answers come late, or "
                "set data.eval_source"
            )
    return *parts, _fingerprint(config, tokenizer, sets, parts), _describe(config, tokenizer, sets, parts, copies)


def _find(config: DataConfig, key: str) -> RecordFiles:
    source = getattr(config, key)
    found = find(source, f"data.{key}")
    if not isinstance(found, RecordFiles):
        raise UserError(
            f"data.{key}={source!r} holds no records, which data.format={config.format} reads: give "
            ".jsonl, .jsonl.gz or .parquet files, or a folder saved by datasets"
        )
    return found


def _source(found: ExampleSet, chosen: np.ndarray, config: DataConfig, tokenizer: Tokenizer) -> ExampleSource:
    return ExampleSource(
        found.tokens,
        found.learned,
        found.starts,
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
    for found in sets:
        for array in (found.tokens, found.learned, found.starts, found.marks):
            digest.update(np.ascontiguousarray(array).data)
    for part in parts:
        digest.update(np.ascontiguousarray(part.order).data)
    return digest.hexdigest()


def _describe(
    config: DataConfig, tokenizer: Tokenizer, sets: Sequence[ExampleSet], parts: Sequence[ExampleSource], copies: int
) -> str:
    total = replace(
        sets[0],
        **{name: sum(getattr(found, name) for found in sets) for name in ("cut", "dropped", "unlearned", "malformed")},
    )
    notes = [f"{tokenizer.name}, vocabulary {tokenizer.vocab_size:,}"]
    if config.format == "chat":
        notes.append(f"chat template of {find_template(tokenizer, config.chat_template).title}")
    elif not end_of_text(tokenizer):
        notes.append("no token ends a completion (the tokenizer has no end-of-text token)")
    if config.special_tokens == "parse":
        notes.append("special tokens written in the text are parsed")
    for count, what in (
        (total.cut, f"longer than {config.seq_len:,} tokens cut at the end"),
        (total.dropped, f"longer than {config.seq_len:,} tokens dropped"),
        (total.unlearned, "without a learned token left out"),
    ):
        if count:
            notes.append(f"{count:,} {'example' if count == 1 else 'examples'} {what}")
    train, held_out = parts
    of = f" of {config.eval_source}" if config.eval_source else ""
    return (
        f"{config.source}: {_counts(train)}, {'packed into' if config.packing else 'in'} {len(train):,} rows of "
        f"{config.seq_len:,} ({100 * train.filled:.1f} % filled); held out {_counts(held_out)}{of}; "
        f"{'; '.join([*notes, *left_out(total.malformed, copies)])}"
    )


def _counts(part: ExampleSource) -> str:
    return (
        f"{part.examples:,} {'example' if part.examples == 1 else 'examples'}, {part.tokens:,} tokens, "
        f"{part.learned:,} learned"
    )
