"""From the prompt cell of a row to the text that the policy continues.

Errors say what is wrong with the cell; the caller puts file, row and column in front.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from string import Formatter
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from spmdrl.data.readers import describe_value
from spmdrl.errors import UserError

if TYPE_CHECKING:
    from spmdrl.config import PromptDataConfig

logger = logging.getLogger(__name__)
Message = dict[str, Any]
Renderer = Callable[[Any, Any], str]  # (prompt cell, cell of TOOLS) -> text
TOOLS = "tools"  # column with the functions that a chat template tells the model of, as in TRL's data sets
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

    def __call__(self, cell: Any, tools: Any = None) -> str:
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

    def __call__(self, cell: Any, tools: Any = None) -> str:
        messages, functions = to_messages(cell), to_tools(tools, self._tokenizer)
        if messages and messages[-1]["role"] == "assistant":
            raise UserError("ends with an assistant turn, which is what the policy writes: end it with a user turn")
        if not messages or is_blank(messages[-1]):
            return ""
        text = render(self._tokenizer, messages, functions, add_generation_prompt=True)
        if not self._is_checked:
            self._is_checked = True
            if text == render(self._tokenizer, messages, functions):
                logger.warning(
                    "The chat template gives the same text with and without a generation prompt: check that prompts "
                    "end with the assistant header, or give another --tokenizer_chat_template. A prompt ends: %r",
                    text[-60:],
                )
        return checked_text(text)


def render(tokenizer: Any, messages: list[Message], tools: list | None, *, add_generation_prompt: bool = False) -> str:
    """The conversation in the tokenizer's chat template."""
    check_tool_calls(tokenizer, messages)
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    with asking_the_template():
        return tokenizer.apply_chat_template(messages, tools=tools, **options)


@contextmanager
def asking_the_template() -> Iterator[None]:
    """UserError for what a template raises."""
    try:
        yield
    except TEMPLATE_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"is refused by the chat template ({reason})") from error


def check_tool_calls(tokenizer: Any, messages: list[Message]) -> None:
    """A template that does not know them would write the content beside them, which is often null, and no more."""
    if any(message.get("tool_calls") for message in messages) and "tool_calls" not in str(tokenizer.chat_template):
        raise UserError(
            "has tool calls, which the chat template does not render: give a --tokenizer_chat_template that does"
        )


def to_tools(cell: Any, tokenizer: Any) -> list[dict[str, Any]] | None:
    """The functions in a row's TOOLS, a list or that list as JSON; None where there are none or the chat template has
    no place for them, which is said once."""
    if cell in (None, "", []):
        return None
    if TOOLS not in str(tokenizer.chat_template):
        _warn_once(f"Rows have tools, which the chat template of {tokenizer.name_or_path} leaves out")
        return None
    try:
        tools = json.loads(cell) if isinstance(cell, str) else cell
    except (ValueError, RecursionError):
        tools = cell
    if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
        raise UserError(
            f"comes with a column {TOOLS!r} that is {describe_value(cell)}, expected a list of functions for the chat "
            "template, or that list as JSON; rename a column of something else"
        )
    return _without_nulls(tools) or None


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)


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
    return {**_without_nulls(item), "content": _without_nulls(content)}


def _without_nulls(value: Any) -> Any:
    """Arrow fills keys that other rows and messages have with None, which templates take for present."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def is_blank(message: Message) -> bool:
    """Whether a turn says nothing and calls no tool."""
    content = message["content"]
    return not message.get("tool_calls") and not (content.strip() if isinstance(content, str) else content)


def plain_text_note(data: Any, tokenizer: Any) -> str | None:
    """What to say where rows are rendered as plain text and nobody chose that over a chat template that is there.

    data: a section with the flags of rows.
    """
    chooses = data.input_template != type(data).input_template or getattr(data, "pretrain_mode", False)
    if data.apply_chat_template or chooses or not tokenizer.chat_template:
        return None
    shape = f" in {data.input_template!r}" if data.input_template else ""
    return f"rows are plain text{shape}; --pretrain has a chat template, which --apply_chat_template would use"


def checked_text(text: str) -> str:
    """`text` itself, if it can be encoded: JSON can spell half of a surrogate pair, which tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"has a character that is not valid Unicode ({text[error.start]!r})") from error
    return text
