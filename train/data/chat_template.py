"""Finds the chat template of a tokenizer, and renders conversations with it.

A downloaded template is a program that is not trusted, so it runs in the sandbox of jinja2, as in transformers: it can
call no functions but those that are given to it. As in transformers, it can use `raise_exception`, `strftime_now`,
`tojson`, loop controls and the block `generation`.
"""

import datetime
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescope.memory.errors import check_readable, one_line
from bytescope.train.data.records import Chat, Malformed, text_of
from bytescope.train.data.tokenizer import Tokenizer
from bytescope.train.user_errors import UserError

# The template for tokenizers without one: OpenAI's ChatML. The model is trained on an answer and its <|im_end|>.
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}{{ '\\n' }}
{%- else -%}{{ message['content'] + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Keys of tokenizer_config.json that a template may use as variables.
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
# Marks before and after the content of a `generation` block. These Unicode noncharacters do not occur in text.
BEGIN, END = "\ufdd0", "\ufdd1"
# `strftime_now` always returns this day, the date in Llama 3's templates, so that the data of a run do not depend on
# the day.
TODAY = datetime.datetime(2024, 7, 26)


@dataclass(frozen=True)
class Template:
    """A chat template.

    Attributes:
      source: its Jinja source.
      title: its name in messages.
      variables: name of a variable in the template, such as eos_token -> special token.
    """

    source: str
    title: str
    variables: dict[str, str]

    @property
    def marks_answers(self) -> bool:
        """True if the template itself marks the text to train on."""
        return GENERATION.search(self.source) is not None


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the content of the tokenizer_config.json in the folder of the tokenizer, or {} if there is no such file.

    Raises UserError if the file is damaged.
    """
    path = getattr(tokenizer, "path", None)
    path = path and path.with_name("tokenizer_config.json")
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("the content of the file is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}): copy it again") from None
    return config


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens in the content of a tokenizer_config.json: key, such as eos_token -> token."""
    entries = {name: config.get(name) for name in TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in entries.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def find_template(tokenizer: Tokenizer, asked: str) -> Template:
    """Returns the chat template to use: the file `asked` if it is given, otherwise the template of the tokenizer,
    otherwise ChatML.

    As in transformers, a chat_template.jinja in the tokenizer's folder has priority over tokenizer_config.json. If the
    tokenizer has several named templates, "default" is used. Raises UserError if the template cannot be read.
    """
    config = tokenizer_config(tokenizer)
    variables = named_tokens(config)
    beside = getattr(tokenizer, "path", None)
    beside = beside and beside.with_name("chat_template.jinja")
    path = Path(os.path.expanduser(asked)) if asked else beside
    if path is not None and (asked or path.is_file()):
        try:
            check_readable(path)
            return Template(path.read_text(encoding="utf-8"), path.name, variables)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            key = f"data.chat_template={asked!r}" if asked else str(path)
            raise UserError(f"{key} cannot be read ({reason}): give the path of a Jinja template") from None
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {row.get("name"): row.get("template") for row in source if isinstance(row, dict)}
        source = named.get("default")
    if isinstance(source, str):
        return Template(source, "tokenizer_config.json", variables)
    return Template(CHATML, "ChatML", variables)


@dataclass(frozen=True)
class Rendered:
    """A conversation that a chat template has rendered.

    Attributes:
      text: the text of the whole conversation.
      learned: spans [from, to) of characters to train on, if the template marks them.
      before: for each answer, the text before it.
      up_to: for each answer, the text up to its end.
    """

    text: str
    learned: list[tuple[int, int]]
    before: list[str]
    up_to: list[str]


class Renderer:
    """Renders conversations with one chat template. Raises UserError if the template is not valid Jinja."""

    def __init__(self, template: Template):
        self.template = template
        try:
            self._compiled = _environment().from_string(template.source)
        except Exception as error:  # jinja2 also raises errors of Python for some templates
            raise UserError(
                f"the chat template of {template.title} is not valid ({one_line(error)}): give another template with "
                "data.chat_template=FILE"
            ) from None

    def render(self, chat: Chat, *, before: bool, up_to: bool) -> Rendered | Malformed:
        """Returns the rendered conversation, or the error with which the template refuses it.

        `before` and `up_to` say whether these fields of `Rendered` are needed; otherwise they are empty.
        """

        def render(count: int, generation_prompt: bool) -> tuple[str, list[tuple[int, int]]]:
            text = self._compiled.render(
                messages=chat.messages[:count],
                tools=chat.tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self.template.variables,
            )
            return _remove_marks(text)

        answers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        try:
            text, learned = render(len(chat.messages), False)
            return Rendered(
                text,
                learned,
                [render(number, True)[0] for number in answers] if before else [],
                [render(number + 1, False)[0] for number in answers] if up_to else [],
            )
        except Exception as error:  # whatever a template raises
            reason = one_line(error) or type(error).__name__
            return Malformed(f"the chat template of {self.template.title} refuses it ({reason})")


def _environment() -> Any:
    """Returns a sandboxed jinja2 environment with the functions that chat templates may call, as in transformers."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Implements {% generation %}, the block of a chat template that marks the text to train on."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

        def parse(self, parser: Any) -> Any:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(lineno)

        def marked(self, caller: Callable[[], str]) -> str:
            return BEGIN + caller() + END

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = TODAY.strftime
    return sandbox


def _remove_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Removes the marks of `generation` blocks from a rendered text. Returns the text and the spans [from, to) of
    characters that were between marks.

    Raises Malformed if the text cannot be encoded as UTF-8, or if marks do not match.
    """
    text_of(text, "the rendered text")
    parts = re.split(f"([{BEGIN}{END}])", text)
    spans, plain, begun = [], [], None
    length = 0
    for part in parts:
        if part == BEGIN and begun is None:
            begun = length
        elif part == END and begun is not None:
            spans.append((begun, length))
            begun = None
        elif part in (BEGIN, END):
            raise Malformed(
                "the template has nested generation blocks, or the text contains the reserved character U+FDD0: "
                "remove them"
            )
        else:
            plain.append(part)
            length += len(part)
    if begun is not None:
        raise Malformed("the template has a generation block without an end: end it with {% endgeneration %}")
    return "".join(plain), spans
