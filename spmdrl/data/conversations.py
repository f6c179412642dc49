"""Rows of supervised sets as texts with the parts that are learned: plain texts, prompt and response, conversations.

Errors say what is wrong with a cell; the caller puts file, row and column in front.
"""

import re
from collections.abc import Sequence
from typing import Any

from spmdrl.data.readers import describe_value
from spmdrl.data.rendering import (
    Message,
    asking_the_template,
    check_tool_calls,
    checked_text,
    parse_input_template,
    render,
    to_messages,
    to_tools,
)
from spmdrl.errors import UserError
from spmdrl.models.tokenizer import Marked

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def plain_text(cell: Any) -> str:
    """`cell`, if it is text."""
    if not isinstance(cell, str):
        raise UserError(f"is {describe_value(cell)}, expected text")
    return checked_text(cell)


class TextTemplate:
    """--input_template around the prompt, and the response after it. `None` takes prompts as they are."""

    def __init__(self, input_template: str | None):
        self._template = "{}" if input_template is None else parse_input_template(input_template)

    def prompt(self, cell: Any) -> str:
        if isinstance(cell, list):
            raise UserError("is a list of messages: add --apply_chat_template")
        return self._template.format(plain_text(cell))

    def joined(self, prompt: str, response: str) -> Marked:
        """The response is learned."""
        text = prompt + response
        return Marked(text, ((len(prompt), len(text)),))


class ChatTemplate:
    """The tokenizer's chat template around whole conversations. `end_tokens` are the texts that end a turn."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[str]):
        if not tokenizer.chat_template:
            raise UserError(
                "--apply_chat_template: the tokenizer has no chat template (a base model?); give one with "
                "--tokenizer_chat_template, as text or as a file, or use --input_template instead"
            )
        self._tokenizer, self._end_tokens = tokenizer, tuple(end_tokens)

    def conversation(self, messages: list[Message], *, first: int, tools: Any = None) -> Marked:
        """The assistant turns from message `first` on are learned, each with the token that ends it. `tools`: the cell
        with the functions that are open to it.

        Their places come from the template's {% generation %} blocks, or where it has none from rendering the
        conversation up to each turn: a template that renders a beginning differently on its own is refused.
        """
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        functions = to_tools(tools, self._tokenizer)
        with asking_the_template():
            template = self._tokenizer.get_chat_template(tools=functions)
        if GENERATION_BLOCK.search(template):
            text, blocks = self._rendered_blocks(messages, functions)
            num_turns = sum(message["role"] == "assistant" for message in messages)
            if len(blocks) != num_turns:
                raise UserError(
                    f"has {num_turns} assistant turns, of which the chat template marks {len(blocks)} with "
                    "{% generation %}"
                )
            parts = [self._until_end(text, *block) for block in blocks[num_turns - len(turns) :]]
        else:
            text = render(self._tokenizer, messages, functions)
            parts = [self._turn(text, messages, turn, functions) for turn in turns]
        if parts and not text[parts[-1][1] :].strip():
            text = text[: parts[-1][1]]  # no line break after the last token that ends a turn
        return Marked(checked_text(text), tuple(parts))

    def _turn(self, text: str, messages: list[Message], turn: int, tools: list | None) -> tuple[int, int]:
        before = render(self._tokenizer, messages[:turn], tools, add_generation_prompt=True) if turn else ""
        until = render(self._tokenizer, messages[: turn + 1], tools) if turn + 1 < len(messages) else text
        if not (until.startswith(before) and text.startswith(until)):
            raise UserError(
                f"message {turn + 1} cannot be told apart from what is before it: the chat template renders the "
                "beginning of a conversation differently on its own. Give a --tokenizer_chat_template that marks the "
                "assistant's turns with {% generation %}, or that does not rewrite earlier turns"
            )
        return self._until_end(text, len(before), len(until))

    def _until_end(self, text: str, start: int, end: int) -> tuple[int, int]:
        """The part with an end token right after it, and without a line break after one inside it."""
        stripped = text[start:end].rstrip()
        if stripped.endswith(self._end_tokens):
            return start, start + len(stripped)
        return start, end + len(next((token for token in self._end_tokens if text.startswith(token, end)), ""))

    def _rendered_blocks(self, messages: list[Message], tools: list | None) -> tuple[str, list[tuple[int, int]]]:
        """The text and the places of its {% generation %} blocks, in characters."""
        from transformers.utils.chat_template_utils import render_jinja_template

        check_tool_calls(self._tokenizer, messages)
        with asking_the_template():
            texts, blocks = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        return texts[0], [tuple(block) for block in blocks[0]]


def response_messages(cell: Any, prompt: list[Message]) -> list[Message]:
    """The messages after `prompt` that a response cell spells: text is one assistant turn, a list of messages is the
    response alone or the whole conversation with the prompt in front."""
    messages = to_messages(cell)
    if isinstance(cell, str) and len(messages) == 1 and messages[0] == {"role": "user", "content": cell}:
        messages = [{"role": "assistant", "content": cell}]
    if prompt and messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if messages and messages[-1]["role"] != "assistant":
        raise UserError(f"ends with a {messages[-1]['role']} turn, expected the assistant's")
    return messages


def repeats(response: Any, *prompts: Any) -> bool:
    """Whether a response, if it is text, begins with its prompt, which is one of these."""
    texts = [prompt.strip() for prompt in prompts if isinstance(prompt, str)]
    return isinstance(response, str) and any(text and response.lstrip().startswith(text) for text in texts)


def common_beginning(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading items are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
