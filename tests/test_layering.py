"""DESIGN.md's layout, by reading the imports: arrows go one way, and each heavy library has one home."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spmdrl"
FILES = sorted(PACKAGE.rglob("*.py"))
# What each part may import of the others, besides itself; cli → trainer → {...} → {algos, experience} → torch.
BASE = {"errors", "launch", "config", "quiet"}
MATHS = {"algos", "experience"}
ARROWS = {
    "errors": set(),
    "launch": {"errors"},
    "quiet": set(),
    "config": {"errors", "launch"},
    "algos": set(),
    "experience": {"algos"},
    "tracking": BASE,
    "distributed": BASE | MATHS,
    "models": BASE | MATHS | {"distributed"},
    "data": BASE | MATHS | {"models"},  # prompts are rendered and encoded by the model's tokenizer
    "rewards": BASE | MATHS | {"distributed", "models", "data"},
    "rollout": BASE | MATHS | {"distributed", "models", "data"},
    "trainer": BASE | MATHS | {"tracking", "distributed", "models", "data", "rewards", "rollout"},
}


def part_of(path: Path) -> str:
    """ "trainer" for spmdrl/trainer/update.py, "errors" for spmdrl/errors.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, `from a import b` as a.b, and where `import torch` is used as torch.x.y."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}", node.lineno


def imports_of(path: Path, *modules: str) -> list[str]:
    """Where a file imports one of the modules or something in them."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for name, line in imports(path)
        if any(name == module or name.startswith(module + ".") for module in modules)
    ]


def outside(folder: str) -> list[Path]:
    return [path for path in FILES if PACKAGE / folder not in path.parents]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_go_one_way(path):
    part = part_of(path)
    if part == "__init__":
        assert not imports_of(path, "spmdrl")
        return
    allowed = ARROWS[part] | {part}
    for name, line in imports(path):
        if name.startswith("spmdrl."):
            assert name.split(".")[1] in allowed, f"{path.name}:{line}: {part} imports {name}"


def test_the_command_line_is_on_top():
    for path in FILES:
        assert not imports_of(path, "cli", "examples", "bench", "tests")


def test_torch_distributed_and_deepspeed_have_one_home():
    assert not [
        found for path in outside("distributed") for found in imports_of(path, "torch.distributed", "deepspeed")
    ]


def test_one_module_imports_vllm():
    assert {path.name for path in FILES if imports_of(path, "vllm")} == {"vllm_engine.py"}


@pytest.mark.parametrize("part", ["config", "launch", "errors"])
def test_flags_and_launchers_are_read_without_heavy_libraries(part):
    heavy = ("torch", "transformers", "deepspeed", "vllm", "numpy", "datasets", "tqdm", "wandb")
    assert not [found for path in FILES if part_of(path) == part for found in imports_of(path, *heavy)]


def test_algorithms_import_only_torch_and_the_standard_library():
    allowed = sys.stdlib_module_names | {"torch"}
    for path in (path for path in FILES if part_of(path) == "algos"):
        assert not imports_of(path, "torch.distributed", "torch.utils")
        foreign = {name for name, _ in imports(path) if name.split(".")[0] not in allowed}
        assert all(name.startswith("spmdrl.algos.") for name in foreign), f"{path.name}: {foreign}"


def test_print_is_for_scripts_and_comm():
    def prints(path: Path) -> bool:
        nodes = ast.walk(ast.parse(path.read_text()))
        return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print" for n in nodes)

    assert {path.relative_to(PACKAGE).as_posix() for path in FILES if prints(path)} <= {"distributed/comm.py"}


def test_nobody_asks_whether_it_is_the_main_rank_but_those_that_write():
    """Everything else would be a statement that not every rank executes (STYLE.md)."""
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if any(isinstance(n, ast.Attribute) and n.attr == "is_main" for n in ast.walk(ast.parse(path.read_text())))
    }
    # the trainer tells the tracker and the libraries' loggers which rank writes
    assert callers <= {
        "distributed/comm.py",
        "distributed/guard.py",
        "tracking.py",
        "trainer/checkpoint.py",
        "trainer/export.py",
        "trainer/generation.py",
        "trainer/output_file.py",
        "trainer/ppo_trainer.py",
        "trainer/saving.py",
        "trainer/supervised_trainer.py",
    }


def test_importing_the_package_is_light():
    code = "import sys; before = set(sys.modules); import spmdrl; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["spmdrl"]
