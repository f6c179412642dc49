"""The choices of a flag whose values are the keys of a table in spmdrl/algos, read without importing torch.

The table stays the only place that knows its entries: a new one is a choice of the flag and in its help at once.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ALGOS = Path(__file__).parents[1] / "algos"


@dataclass(frozen=True)
class Registry:
    """`Annotated[str, Registry("losses.py", "POLICY_LOSSES")]`: a key of that dict literal or of `extra`."""

    file: str
    table: str
    extra: tuple[str, ...] = ()

    def choices(self) -> tuple[str, ...]:
        return self.extra + tuple(self._rows())

    def properties(self, name: str) -> dict[str, Any]:
        """Constant keywords of an entry: {"min_samples": 2} for `"rloo": Estimator(leave_one_out, min_samples=2)`."""
        call = self._rows().get(name)
        keywords = call.keywords if isinstance(call, ast.Call) else []
        return {k.arg: k.value.value for k in keywords if k.arg and isinstance(k.value, ast.Constant)}

    def parameters(self, name: str) -> frozenset[str]:
        """Keyword-only parameters of the function that an entry names, itself or through `partial`."""
        entry = self._rows()[name]
        entry = entry.args[0] if isinstance(entry, ast.Call) and entry.args else entry
        functions = {node.name: node for node in parsed(ALGOS / self.file).body if isinstance(node, ast.FunctionDef)}
        function = functions.get(ast.unparse(entry))
        return frozenset(arg.arg for arg in function.args.kwonlyargs) if function else frozenset()

    def _rows(self) -> dict[str, ast.expr]:
        return dict_literal(ALGOS / self.file, self.table)


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a Python file, read once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def dict_literal(path: Path, table: str) -> dict[str, ast.expr]:
    """Key → value expression of the module-level dict literal `table` of a Python file, in order."""
    for node in parsed(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            value = getattr(node, "value", None)
            assert isinstance(value, ast.Dict), f"{table} in {path} is not a dict literal"
            return {ast.literal_eval(k): v for k, v in zip(value.keys, value.values, strict=True) if k is not None}
    raise AssertionError(f"{path} has no table {table}")


def dict_of_strings(path: Path, table: str) -> dict[str, str]:
    """A dict literal whose values are string literals."""
    return {key: ast.literal_eval(value) for key, value in dict_literal(path, table).items()}
