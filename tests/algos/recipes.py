"""The recipes of docs/algorithms.md: name -> command-line words."""

import re
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "algorithms.md"
RECIPES: dict[str, list[str]] = {
    name: flags.split() for name, flags in re.findall(r"### (.+?)\n.*?```flags\n(.+?)```", DOC.read_text(), re.DOTALL)
}
