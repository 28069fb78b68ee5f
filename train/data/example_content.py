"""Reads the content of a record in each format: messages, or a prompt and its completion."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bytescope.train.data.records import Malformed, text_of

# Role in ShareGPT records ("conversations" with "from" and "value") -> role in messages.
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "model": "assistant"}
# The prompts of Stanford Alpaca (Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca), with an input and without.
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
      messages: the messages, each a dict with role, content and any other keys that the message has in the record.
      tools: descriptions of tools for the chat template, or None.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None

    def key(self) -> str:
        """Returns the content as text. Two conversations have the same text if and only if they are copies."""
        return json.dumps([self.messages, self.tools], sort_keys=True)


@dataclass(frozen=True)
class Pair:
    """A training example of two texts: a prompt, and the completion that the model learns to answer with."""

    prompt: str
    completion: str

    def key(self) -> str:
        """Returns the content as text. Two pairs have the same text if and only if they are copies."""
        return json.dumps([self.prompt, self.completion])


def chat_of(values: dict[str, Any]) -> Chat:
    """Returns the conversation in a record with "messages" (role, content) or "conversations" (from, value).

    Raises Malformed if the record has no conversation.
    """
    messages = values.get("messages", values.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise Malformed('the record has no list of "messages" or "conversations": give one of them')
    tools = values.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise Malformed(f'"tools" of the record is {type(tools).__name__}, but must be a list')
    return Chat([_message(message, number) for number, message in enumerate(messages, 1)], tools or None)


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Malformed(
            f"message {number} is {type(message).__name__}, but must be a JSON object with a role and a content"
        )
    fields = {key: value for key, value in message.items() if value is not None}  # tables have nulls in unused columns
    if "from" in fields and "role" not in fields:
        fields["role"], fields["content"] = fields.pop("from"), fields.pop("value", None)
        fields["role"] = (
            ROLES.get(fields["role"], fields["role"]) if isinstance(fields["role"], str) else fields["role"]
        )
    text_of(fields.get("role"), f"the role of message {number}")
    if "tool_calls" in fields and fields.get("content") is None:  # an answer that only calls tools
        return {**fields, "content": ""}
    text_of(fields.get("content"), f"the content of message {number}")
    return fields


def pair_of(values: dict[str, Any]) -> Pair:
    """Returns the prompt and completion in a record with "prompt" and "completion", or in Alpaca's format with
    "instruction", "input" and "output".

    Raises Malformed if the record has neither.
    """
    if "instruction" in values and "prompt" not in values:
        instruction = text_of(values["instruction"], '"instruction"')
        given = text_of(values.get("input", ""), '"input"')
        prompt = (ALPACA_INPUT if given else ALPACA).format(instruction=instruction, input=given)
        return Pair(prompt, text_of(values.get("output"), '"output"'))
    return Pair(text_of(values.get("prompt"), '"prompt"'), text_of(values.get("completion"), '"completion"'))


# data.format -> (fields of a record that are read, function from a record to its content).
CONTENTS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Chat | Pair]]] = {
    "chat": (("messages", "conversations", "tools"), chat_of),
    "pairs": (("prompt", "completion", "instruction", "input", "output"), pair_of),
}
