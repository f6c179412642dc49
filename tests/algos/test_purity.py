"""spmdrl/algos imports torch and the standard library only, and its tables can be read without torch."""

import ast
import sys
from pathlib import Path

import pytest

ALGOS = Path(__file__).parents[2] / "spmdrl" / "algos"
FILES = sorted(ALGOS.glob("*.py"))
TABLES = {
    "advantages.py": ["ESTIMATORS"],
    "losses.py": ["POLICY_LOSSES", "AGGREGATIONS", "AGGREGATION_OF"],
    "kl.py": ["KL_ESTIMATORS", "KL_LOSS_REFUSED"],
    "corrections.py": ["CORRECTIONS"],
    "preference.py": ["DPO_LOSSES", "RM_LOSSES", "KD_LOSSES"],
}


def imported_modules(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_algorithms_import_only_torch_and_the_standard_library(path):
    for module in imported_modules(path):
        assert module.split(".")[0] in sys.stdlib_module_names | {"torch", "spmdrl"}, f"{path.name} imports {module}"
        assert not module.startswith("torch.distributed"), f"{path.name} imports {module}"
        assert module.split(".")[0] != "spmdrl" or module.startswith("spmdrl.algos"), f"{path.name} imports {module}"
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Attribute) and node.attr == "distributed"), f"{path.name}:{node.lineno}"


@pytest.mark.parametrize(("file", "table"), [(file, table) for file, tables in TABLES.items() for table in tables])
def test_every_table_is_a_literal_with_string_keys(file, table):
    for node in ast.parse((ALGOS / file).read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == table:
            assert isinstance(node.value, ast.Dict)
            assert all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.value.keys)
            return
    pytest.fail(f"{file} has no table {table}")
