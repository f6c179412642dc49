"""The text of --help: flags by section, each with its default and the docstring below its field."""

import ast
import inspect
import shutil
import sys
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from spmdrl.config.flags import Flag, flags_of
from spmdrl.config.registry import parsed

_METAVAR = {int: "INT", float: "FLOAT", str: "TEXT"}
_INDENT = 8


def help_text(cls: type) -> str:
    """What a config class says about itself and its flags, as wide as the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    sections: dict[str | None, Any] = {name: hint for name, hint in get_type_hints(cls).items() if is_dataclass(hint)}
    sections[None] = cls
    parts = [f"usage: {Path(sys.argv[0]).name} --flag value ...", _fill(inspect.getdoc(cls) or "", width, 0)]
    for name, section in sections.items():
        title = inspect.getdoc(section) if name else "The run."
        texts = field_docs(section)
        flags = [flag for flag in flags_of(cls).values() if flag.section == name]
        parts.append("\n".join([title or "", *(_entry(flag, texts[flag.name], width) for flag in flags)]))
    parts[-1] += f"\n  --config FILE\n{_fill('Read flags from a yaml file; the command line wins.', width, _INDENT)}"
    return "\n\n".join(parts) + "\n"


def _entry(flag: Flag, text: str, width: int) -> str:
    if flag.kind is bool:
        heading = f"--{flag.name}" if flag.default is False else f"--{flag.name}, --no_{flag.name}"
        return f"{_fill(heading, width, 2)}\n{_fill(text, width, _INDENT)}"
    value = "{" + ",".join(flag.choices) + "}" if flag.choices else _METAVAR[flag.kind]
    values = f"[{value} ...]" if flag.num_values is None else " ".join([value] * flag.num_values)
    default = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else flag.default
    default = "" if flag.default in (None, ()) else f" (default: {default})"
    return f"  --{flag.name} {values}\n{_fill(text + default, width, _INDENT)}"


def _fill(text: str, width: int, indent: int) -> str:
    text = " ".join(text.split())
    return textwrap.fill(
        text, width, initial_indent=" " * indent, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def field_docs(cls: type) -> dict[str, str]:
    """Field name → the string below it in the source of the class, or of the class that it takes the field from."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            docs |= _own_docs(base)
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    classes = (node for node in parsed(Path(inspect.getfile(cls))).body if isinstance(node, ast.ClassDef))
    node = next(node for node in classes if node.name == cls.__name__)
    docs = {}
    for item, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(below, ast.Expr):
            docs[item.target.id] = str(ast.literal_eval(below.value))
    return docs
