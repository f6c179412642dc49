"""The one exception for input that a user can correct."""


class UserError(ValueError):
    """Bad flag, file, row or function of the user's: one line that says what is wrong, where and what to do.

    The command line prints the message without a traceback and exits with 2, from every rank.
    """


def first_line(error: BaseException) -> str:
    """What a library's error says, for a message of one line; the error's kind where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def shortened(text: str, limit: int = 80) -> str:
    """The start of what a user gave, for a message of one line."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
