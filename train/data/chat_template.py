"""Finds the chat template of a tokenizer, and renders conversations with it through train/data/chat_renderer.py."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescope.memory.errors import check_readable, one_line
from bytescope.train.data import chat_renderer
from bytescope.train.data.example_content import Chat
from bytescope.train.data.records import Malformed, text_of
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
    """A process that renders conversations with one chat template. Use it as a context manager, which ends the
    process.
    """

    def __init__(self, template: Template):
        """Starts the process. Raises UserError if the template is not valid Jinja."""
        self.template = template
        self._process = subprocess.Popen(
            [sys.executable, "-P", chat_renderer.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # both are pipes
        self._requests, self._replies = self._process.stdin, self._process.stdout
        try:
            self._ask(
                {
                    "template": template.source,
                    "variables": template.variables,
                    "seconds": chat_renderer.SECONDS,
                    "bytes": chat_renderer.BYTES,
                    "totals": [chat_renderer.TOTAL_SECONDS, chat_renderer.TOTAL_CHARACTERS],
                }
            )
            self._answer()
        except BaseException as error:
            self.close()
            if not isinstance(error, Malformed):
                raise
            raise UserError(
                f"the chat template of {template.title} is not valid ({error}): give another template with "
                "data.chat_template=FILE"
            ) from None

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the process that renders the chat template, and waits until it has ended."""
        self._process.kill()
        for stream in (self._requests, self._replies):
            with contextlib.suppress(OSError):  # closing writes buffered requests, which may fail
                stream.close()
        self._process.wait()

    def render(self, chats: Sequence[Chat], *, before: bool, up_to: bool) -> list[Rendered | Malformed]:
        """Renders conversations. Each result is the rendered conversation, or the error with which the template
        refuses it.

        `before` and `up_to` say whether these fields of `Rendered` are needed.

        Raises UserError and ends the process if the template uses too much time for one conversation or for all
        conversations so far, or writes too much text.
        """
        self._ask(
            [{"messages": chat.messages, "tools": chat.tools, "before": before, "up_to": up_to} for chat in chats]
        )
        results: list[Rendered | Malformed] = []
        for _ in chats:
            try:
                answer = self._answer()
                text, learned = _remove_marks(answer["text"])
                parts = [[_remove_marks(part)[0] for part in answer[name]] for name in ("before", "up_to")]
                results.append(Rendered(text, learned, *parts))
            except Malformed as error:
                results.append(Malformed(f"the chat template of {self.template.title} refuses it ({error})"))
        return results

    def _ask(self, request: Any) -> None:
        with contextlib.suppress(OSError):  # the process has ended; reading its answer reports that
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()

    def _answer(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            code = self._process.wait()
            raise UserError(
                f"the chat template of {self.template.title} ran longer than {chat_renderer.SECONDS} s or "
                f"needed more than {chat_renderer.BYTES >> 20} MiB for one conversation (exit {code}): give "
                "another template with data.chat_template=FILE"
            )
        answer = json.loads(line)
        if "stopped" in answer:
            raise UserError(
                f"the chat template of {self.template.title} was stopped because it {answer['stopped']}, far more than "
                "published templates need: give another template with data.chat_template=FILE"
            )
        if "error" in answer:
            raise Malformed(one_line(answer["error"]))
        return answer


def _remove_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Removes the marks of `generation` blocks from a rendered text. Returns the text and the spans [from, to) of
    characters that were between marks.

    Raises Malformed if the text cannot be encoded as UTF-8, or if marks do not match.
    """
    text_of(text, "the rendered text")
    parts = re.split(f"([{chat_renderer.BEGIN}{chat_renderer.END}])", text)
    spans, plain, begun = [], [], None
    length = 0
    for part in parts:
        if part == chat_renderer.BEGIN and begun is None:
            begun = length
        elif part == chat_renderer.END and begun is not None:
            spans.append((begun, length))
            begun = None
        elif part in (chat_renderer.BEGIN, chat_renderer.END):
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
