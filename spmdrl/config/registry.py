"""The choices of a flag whose values are the keys of a table in spmdrl/algos, read without importing torch."""

import ast
from dataclasses import dataclass
from pathlib import Path

ALGOS = Path(__file__).parents[1] / "algos"


@dataclass(frozen=True)
class Registry:
    """`Annotated[str, Registry("losses.py", "POLICY_LOSSES")]`: one of the keys of that dict literal."""

    file: str
    table: str
    extra: tuple[str, ...] = ()

    def choices(self) -> tuple[str, ...]:
        return self.extra + registry_keys(ALGOS / self.file, self.table)


def registry_keys(path: Path, table: str) -> tuple[str, ...]:
    """String keys of the module-level dict literal `table` of the Python file `path`, in order."""
    for node in ast.parse(path.read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            assert isinstance(node.value, ast.Dict), f"{table} in {path} is not a dict literal"
            return tuple(ast.literal_eval(key) for key in node.value.keys if key is not None)
    raise AssertionError(f"{path} has no table {table}")
