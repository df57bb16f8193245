"""``sglang_ddtree.tree`` stays free of SGLang and FlashInfer."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_ddtree.tree

TREE = Path(sglang_ddtree.tree.__file__).parent
FILES = sorted(TREE.rglob("*.py"))
FORBIDDEN = {"sglang", "sgl_kernel", "flashinfer", "vllm", "transformers"}
ALLOWED = {"torch", "numpy"}
KERNELS = {"triton"}  # under kernels/ only


def imported_modules(source: str) -> set[str]:
    """Full names of the modules that ``source`` imports anywhere, in functions and conditions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def foreign_modules(source: str, extra: frozenset[str] = frozenset()) -> set[str]:
    def is_fine(name: str) -> bool:
        package = name.split(".")[0]
        in_tree = name == "sglang_ddtree.tree" or name.startswith("sglang_ddtree.tree.")
        return in_tree or package in ALLOWED | extra or package in sys.stdlib_module_names

    return {name for name in imported_modules(source) if not is_fine(name)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TREE)))
def test_only_torch_and_numpy(path: Path) -> None:
    extra = frozenset(KERNELS) if "kernels" in path.relative_to(TREE).parts else frozenset()
    assert foreign_modules(path.read_text(), extra) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import sglang",
        "from sglang.srt import x",
        "def f():\n    import flashinfer.decode",
        "from sglang_ddtree import worker",
        "from sglang_ddtree.worker import x",
        "if True:\n    from .. import worker",
        "import triton",
    ],
)
def test_the_check_can_fail(source: str) -> None:
    assert foreign_modules(source)


def test_importing_the_tree_loads_no_engine() -> None:
    modules = [
        ".".join(("sglang_ddtree", "tree", *path.relative_to(TREE).with_suffix("").parts)).removesuffix(".__init__")
        for path in FILES
        if "kernels" not in path.relative_to(TREE).parts
    ]
    assert "sglang_ddtree.tree.build" in modules and "sglang_ddtree.tree" in modules
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted({FORBIDDEN!r} & {{name.split('.')[0] for name in sys.modules}}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
