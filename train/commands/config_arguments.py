"""Arguments that several commands share: the config and its overrides, the target and --lora."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.commands import trainer_packages
from bytescope.memory.commands.arguments import add_forms, add_settings, is_setting, is_target
from bytescope.memory.devices.platform import JAX_FRACTION
from bytescope.memory.errors import ReportError
from bytescope.memory.subjects.subject import Subject
from bytescope.train.commands import subjects
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.source import NO_CONFIG
from bytescope.train.user_errors import UserError

LORA_RANK, LORA_DEFAULT_RANK = "lora.rank", 16
SET_KEY = "set a key of the subject, such as batch.micro=4 (bytescope list keys) or a parameter of FUNCTION"
CONFIG_FORMS = {
    "NAME": "a shipped config, such as llama_8b; bytescope list configs lists them",
    "CONFIG.py": "a Python file with a function get_config",
}
# The word of a form -> a line about it, for the commands that take any program.
PROGRAM_FORMS = {
    **CONFIG_FORMS,
    "FILE.py:FUNCTION": "your own step, also as MODULE:FUNCTION. FUNCTION is called without arguments and returns "
    "(step, arguments), such as (step, (state, batch)); or (step, arguments, options of jax.jit); or "
    "jax.jit(step).trace(...)",
    "maxtext:NAME": "a config of MaxText, if MaxText is installed",
    "DUMP": "an XLA dump: a file *after_optimizations.hlo.pb or .hlo.pb.gz, or the folder of a dump, of which the "
    "largest program is used",
}
_TARGET_FORMS = {
    "h100:8": "8 GPUs of one host; bytescope list targets lists the chips",
    "h100:2x8": "2 hosts with 8 GPUs each",
    "v5e:4x4": "a TPU slice of 4 x 4 chips",
    "cpu:8": "8 devices that jax simulates on the CPU",
    "local": "the devices of this machine",
    "h100:8@0.9": "GPUs on which jax may use 0.9 of the memory (default: XLA_CLIENT_MEM_FRACTION, else "
    f"{TRAIN_FRACTION.value} for a config and {JAX_FRACTION.value} for any other program)",
}


def add_subject(
    parser: argparse.ArgumentParser,
    overriding: str = SET_KEY,
    forms: Mapping[str, str] = CONFIG_FORMS,
    needs: str = "config",
) -> None:
    """Adds the words of a command: the subject, the target (the devices to compile for) and KEY=VALUE.

    Args:
        overriding: help text of KEY=VALUE.
        forms: the forms of the subject, example -> meaning.
        needs: what the command needs of its subject, one of `Subject.has`.
    """
    add_config(parser, forms, needs)
    add_target(parser, "devices to compile for, such as h100:8 (default: local); all forms are listed below")
    add_settings(parser, overriding)
    add_forms(parser, "TARGET", _TARGET_FORMS)


def add_target(parser: argparse.ArgumentParser, meaning: str, default: str | None = "local") -> None:
    """Adds the word TARGET, with its help text and the target that is used without the word."""
    parser.add_argument("target", nargs="?", metavar="TARGET", help=meaning)
    parser.set_defaults(default_target=default)


def add_config(parser: argparse.ArgumentParser, forms: Mapping[str, str] = CONFIG_FORMS, needs: str = "config") -> None:
    """Adds the word CONFIG, or SUBJECT if other forms than those of configs are given, and the list of its forms. The
    parsed arguments have the field `subject`, a `memory.subjects.Subject`, or None without the word.

    forms: the forms of the word, example -> meaning. needs: what the command needs of its subject, one of
    `Subject.has`.
    """
    parser.set_defaults(needs=needs)
    word = "CONFIG" if forms is CONFIG_FORMS else "SUBJECT"
    example = (
        "program, such as llama_8b or step.py:program" if "FILE.py:FUNCTION" in forms else "config, such as llama_8b"
    )
    parser.add_argument("word", nargs="?", metavar=word, help=f"the {example}; all forms are listed below")
    add_forms(parser, word, forms)


def parse_words(parser: argparse.ArgumentParser, argv: Sequence[str], called: str) -> argparse.Namespace:
    """Parses a command line whose words are a subject, keys of it (KEY=VALUE or --config.KEY=VALUE) and a target. The
    result has the pairs (key, text) in `overrides`, and the subject, with these keys, in `subject`.

    called: the command as the user calls it, such as "compare --levers".

    Raises:
      ValueError: the command line is not valid.
    """
    rest, overrides = split_overrides(argv)
    args = parser.parse_intermixed_args(rest)  # options may be between config and target
    args.overrides = overrides
    if "settings" in args:
        if "--" in rest:
            raise ReportError("the words after -- are arguments of a script, and the command runs none: leave them out")
        _sort_words(parser, args)
    args.subject = _open(args, called) if vars(args).get("word") is not None else None
    if vars(args).get("target", "") is None:
        args.target = args.default_target
    return args


def _open(args: argparse.Namespace, called: str) -> Subject:
    subject = subjects.open_subject(args.word, args.overrides, vars(args).get("xla", ()))
    if args.needs not in subject.has:
        raise subjects.refusal(args.word, subject, called, args.needs)
    subject.check_flags(called, args)
    return subject


def _sort_words(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Sorts the words. The first is the subject, later ones KEY=VALUE are keys, and the rest is the target."""
    places = [name for name in ("word", "target") if name in args]
    words = [vars(args)[name] for name in places if vars(args)[name] is not None] + args.settings
    subject = words[:1] if places else []
    if subject and is_setting(subject[0]) and not os.path.exists(subject[0]):
        or_flag = f", or --config.{subject[0]}" if "target" not in places else ""  # train needs no config
        raise ReportError(
            f"{subject[0]} is the first word, which is the config: write a config such as tiny before it{or_flag}"
        )
    settings = [word for word in words[len(subject) :] if is_setting(word)]
    rest = [word for word in words[len(subject) :] if not is_setting(word)]
    others = [*subject, *sorted(rest, key=lambda word: not is_target(word))]
    if places == ["word"] and others and is_target(others[0]) and not os.path.exists(others[0]):
        parser.error(f"unrecognized arguments: {others[0]}")
    for name in places:
        setattr(args, name, others.pop(0) if others else None)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    _refuse_swapped(args)
    for key, _, text in (word.partition("=") for word in settings):
        if "," in text and "grid" in args and not is_adapted(args.word):
            raise ReportError(
                f"{key}={text} has several values: write --grid={key}={text} to compare them, or --config.{key}={text} "
                "for one value with commas"
            )
        args.overrides.append((key, text))


def _refuse_swapped(args: argparse.Namespace) -> None:
    first, second = args.word, vars(args).get("target")
    if first and second and is_target(first) and not is_target(second):
        raise ReportError(f"{first} is a target, which follows the config: write {second} {first}")


def require_subject(args: argparse.Namespace) -> Subject:
    """Returns the subject of the command line. Raises ReportError if there is none."""
    if args.subject is None:
        more = "; or give MODULE:FUNCTION or an XLA dump as the first argument" if args.needs == "program" else ""
        raise ReportError(f"{NO_CONFIG}{more}")
    return args.subject


def add_lora(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds the flag --lora. `more` is appended to its help text."""
    parser.add_argument(
        "--lora",
        action="store_true",
        help=f"train LoRA adapters instead of the weights (rank {LORA_DEFAULT_RANK}){more}",
    )


def with_lora(name: str, overrides: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Returns the overrides of a config with --lora: if it has no LoRA adapters, with lora.rank as the default rank.

    Args:
      name: the config.
      overrides: pairs (dotted key, text) of the command line.

    Raises:
      ReportError: --lora is given together with lora.rank=0.
      UserError: the config cannot be read.
    """
    from bytescope.train.program.config_files import load_flat

    if load_flat(name, overrides)[LORA_RANK]:
        return overrides
    if LORA_RANK in dict(overrides):
        raise ReportError(
            f"--lora trains adapters, but {LORA_RANK}={dict(overrides)[LORA_RANK]} switches them off: leave one out"
        )
    return [*overrides, (LORA_RANK, str(LORA_DEFAULT_RANK))]


def suggest_keys(name: str) -> Sequence[str]:
    """Returns the config keys whose last part is `name`, as suggestions for an unknown flag. Returns none if the
    trainer's packages, which the config files need, are not installed."""
    if not trainer_packages.are_installed():
        return ()
    from bytescope.train.program.config_files import keys_named

    return keys_named(name)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separates config overrides from other arguments. Returns (other arguments, pairs (key, value as text)).
    Overrides are written `--config.KEY=VALUE` or `--config.KEY VALUE`.

    Raises:
      UserError: a key has no value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    pending = iter(argv)
    for argument in pending:
        name = argument.lstrip("-")
        if not argument.startswith("-") or not name.startswith("config."):
            rest.append(argument)
            continue
        key, equals, text = name.removeprefix("config.").partition("=")
        if not equals:
            text = next(pending, "--")
            if text.startswith("--"):
                raise UserError(f"--config.{key} has no value: write --config.{key}=VALUE")
        overrides.append((key, text))
    return rest, overrides
