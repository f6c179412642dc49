"""Finding the answer in a response: strings in, strings and numbers out. Standard library only."""

import re
from collections.abc import Sequence
from decimal import Decimal

# A minus counts only where nothing that could be subtracted from touches it: "10-5" ends in 5, "x = -5" in -5.
NUMBER = re.compile(
    r"(?:(?<![\w)\]}])(?P<minus>-))?(?<![\w.])\$?(?P<minus_behind_currency>(?<=\$)-)?"
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)
SPECIAL_TOKENS = re.compile(r"(?:<\|[^<>|]*\|>|</?s>|<(?:eos|pad|end_of_turn)>|\s)+\Z")


def responses(queries: Sequence[str], prompts: Sequence[str]) -> list[str]:
    """What the model added to each prompt, without the end-of-text tokens behind it."""
    return [response(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]


def response(query: str, prompt: str) -> str:
    if not query.startswith(prompt):
        raise ValueError(f"the query does not begin with its prompt: {query[:60]!r}")
    return SPECIAL_TOKENS.sub("", query[len(prompt) :]).strip()


def numbers_in(text: str) -> list[Decimal]:
    """Every number, with its sign; thousands separators and currency signs are read over."""
    text = text.replace("\u2212", "-").replace("\\$", "$").replace("{,}", ",")
    return [_decimal(match) for match in NUMBER.finditer(text)]


def _decimal(match: re.Match[str]) -> Decimal:
    number = Decimal(match["number"].replace(",", ""))
    return -number if match["minus"] or match["minus_behind_currency"] else number


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, braces inside it included; None without one, or where it is cut off."""
    start = text.rfind("\\boxed{")
    depth, begin = 1, start + len("\\boxed{")
    for end in range(begin, len(text) if start >= 0 else begin):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end].strip()
    return None


def final_number(text: str) -> Decimal | None:
    r"""The number a worked solution ends in: the first behind the last ####, else that in \boxed{}, else the last one.

    None without a number, and for a box of several, such as a fraction.
    """
    _, marker, behind = text.rpartition("####")
    if marker:
        return next(iter(numbers_in(behind.strip().partition("\n")[0])), None)
    boxed = last_boxed(text)
    found = numbers_in(text if boxed is None else boxed)
    return found[-1] if found and (boxed is None or len(found) == 1) else None


def required_number(label: object) -> Decimal:
    """`final_number` of a label, which must have one."""
    number = final_number(str(label))
    if number is None:
        raise ValueError(f"no number in the label {label!r}")
    return number
