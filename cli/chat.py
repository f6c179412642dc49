"""Talk to a model in the terminal: `python cli/chat.py --pretrain MODEL`."""

import os
import sys

from spmdrl.config import parse_config
from spmdrl.config.chat import ChatConfig
from spmdrl.errors import UserError


def talk(config: ChatConfig) -> None:
    """Answer lines of stdin until it ends: answers go to stdout, what is wrong with a line to stderr."""
    from spmdrl.quiet import quiet_libraries
    from spmdrl.rollout.chat import COMMANDS, Chat

    quiet_libraries(is_main=True)
    chat = Chat(config)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 (input() edits lines with it)

        print(COMMANDS)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
            if line == "/quit":
                return
            if line:
                chat.hear(line)
        except EOFError:
            return
        except KeyboardInterrupt:
            print(f"\n{COMMANDS}")
        except UserError as error:
            say(error)


def say(error: UserError) -> None:
    sys.stderr.write(f"error: {error}\n")


if __name__ == "__main__":
    config = parse_config(ChatConfig)
    sys.stdin.reconfigure(errors="surrogateescape")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        talk(config)
    except UserError as error:
        say(error)
        sys.exit(2)
    except KeyboardInterrupt:  # while the model loads
        sys.exit(130)
    except BrokenPipeError:  # whoever reads the answers has heard enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
