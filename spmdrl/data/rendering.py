"""From the prompt cell of a row to the text that the policy continues.

Errors say what is wrong with the cell; the caller puts file, row and column in front.
"""

import json
import logging
import re
from collections.abc import Callable
from string import Formatter
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from spmdrl.data.readers import describe_value
from spmdrl.errors import UserError

if TYPE_CHECKING:
    from spmdrl.config import PromptDataConfig

logger = logging.getLogger(__name__)
Message = dict[str, Any]
Renderer = Callable[[Any], str]
ENCODED_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(role|content)"\s*:')
# What a chat template, which is code of the checkpoint's, raises on conversations that it does not take.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


def make_renderer(config: "PromptDataConfig", tokenizer: Any) -> Renderer:
    """The function from a prompt cell to its text that `--apply_chat_template` and `--input_template` ask for.

    An empty text means that the cell has nothing to answer.
    """
    if config.apply_chat_template and config.input_template is not None:
        raise UserError("--apply_chat_template and --input_template both shape the prompt: give one of them")
    if config.apply_chat_template:
        return ChatRenderer(tokenizer)
    return TextRenderer(config.input_template)


class TextRenderer:
    """Raw text, or `--input_template` with the text in place of its {}."""

    def __init__(self, input_template: str | None):
        self._template = "{}" if input_template is None else parse_input_template(input_template)

    def __call__(self, cell: Any) -> str:
        if isinstance(cell, list) or (isinstance(cell, str) and _decode_messages(cell) is not None):
            raise UserError("is a list of messages: add --apply_chat_template")
        if not isinstance(cell, str):
            raise UserError(f"is {describe_value(cell)}, expected text")
        return self._template.format(checked_text(cell)) if cell.strip() else ""


def parse_input_template(template: str) -> str:
    r"""Checks that the template has one {}, and takes \n, as shells hand it over from '...\n', for a line break."""
    try:
        fields = [(f, spec, conversion) for _, f, spec, conversion in Formatter().parse(template) if f is not None]
    except ValueError as error:
        raise UserError(f"--input_template {template!r}: {error}; write other braces as {{{{ and }}}}") from error
    if fields != [("", "", None)]:
        raise UserError(
            f"--input_template {template!r} must have {{}} once, where the prompt goes; "
            f"write other braces as {{{{ and }}}}"
        )
    return template.replace("\\n", "\n")


class ChatRenderer:
    """The tokenizer's chat template with the generation prompt at the end. Text is one user turn."""

    def __init__(self, tokenizer: Any):
        if not tokenizer.chat_template:
            raise UserError(
                "--apply_chat_template: the tokenizer has no chat template (a base model?); give one with "
                "--tokenizer_chat_template, as text or as a file, or use --input_template instead"
            )
        self._tokenizer = tokenizer
        self._is_checked = False

    def __call__(self, cell: Any) -> str:
        messages = to_messages(cell)
        if messages and messages[-1]["role"] == "assistant":
            raise UserError("ends with an assistant turn, which is what the policy writes: end it with a user turn")
        if not messages or _is_blank(messages[-1]["content"]):
            return ""
        text = self._render(messages, add_generation_prompt=True)
        if not self._is_checked:
            self._is_checked = True
            if text == self._render(messages, add_generation_prompt=False):
                logger.warning(
                    "The chat template gives the same text with and without a generation prompt: check that prompts "
                    "end with the assistant header, or give another --tokenizer_chat_template. A prompt ends: %r",
                    text[-60:],
                )
        return checked_text(text)

    def _render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TEMPLATE_ERRORS as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(f"is refused by the chat template ({reason})") from error


def to_messages(cell: Any) -> list[Message]:
    """Text, a list of messages or that list as JSON text: a list of messages, each with a role and content."""
    if isinstance(cell, str):
        decoded = _decode_messages(cell)
        cell = [{"role": "user", "content": cell}] if decoded is None else decoded
    if not isinstance(cell, list):
        raise UserError(f"is {describe_value(cell)}, expected text or a list of messages")
    return [_to_message(item, number) for number, item in enumerate(cell, 1)]


def _decode_messages(text: str) -> list | None:
    """The list of messages that `text` spells in JSON; None for any other text, other JSON included."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if ENCODED_MESSAGES.match(text):
            raise UserError(f"starts like a list of messages in JSON but is not valid JSON: {error}") from error
        return None
    is_messages = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
    return value if is_messages else None


def _to_message(item: Any, number: int) -> Message:
    if not isinstance(item, dict):
        raise UserError(f"message {number} is {describe_value(item)}, expected an object with role and content")
    if not isinstance(item.get("role"), str):
        raise UserError(f"message {number} has no role; it has {', '.join(map(str, item)) or 'nothing'}")
    content = item.get("content")
    if not isinstance(content, str | list) and not item.get("tool_calls"):
        raise UserError(f"message {number} ({item['role']}) has no text in 'content'")
    # Arrow fills keys that other messages have with None, which templates take for present.
    return {**{key: value for key, value in item.items() if value is not None}, "content": content}


def _is_blank(content: Any) -> bool:
    return not (content.strip() if isinstance(content, str) else content)


def checked_text(text: str) -> str:
    """`text` itself, if it can be encoded: JSON can spell half of a surrogate pair, which tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"has a character that is not valid Unicode ({text[error.start]!r})") from error
    return text
