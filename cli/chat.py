"""Talk to a model in the terminal: `python cli/chat.py --pretrain MODEL`."""

import sys

from spmdrl.config import parse_config
from spmdrl.config.chat import ChatConfig
from spmdrl.errors import UserError


def talk(config: ChatConfig) -> None:
    """Answer lines of stdin until it ends."""
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
            if line == "/clear":
                chat.conversation.turns.clear()
            elif line.startswith("/") and line[1:].isalpha():
                print(f"no such command: {COMMANDS}")
            elif line:
                chat.answer(line)
        except EOFError:
            return
        except KeyboardInterrupt:
            print(f"\n{COMMANDS}")
        except UserError as error:
            print(f"error: {error}")


if __name__ == "__main__":
    config = parse_config(ChatConfig)
    try:
        talk(config)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:  # while the model loads
        sys.exit(130)
