"""The SGLang contract: the table names everything the package uses, and a mismatch is told with its reason."""

import ast
import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest

import sglang_ddtree
from sglang_ddtree import compat
from sglang_ddtree.compat import CONTRACT, TOOLS, Name, check_name
from sglang_ddtree.errors import DDTreeError

PACKAGE = Path(sglang_ddtree.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "compat.py")
NAMES = (*CONTRACT, *TOOLS)
PATHS = {name.path.replace(":", ".") for name in NAMES}
LISTED = PATHS | {f"{name.path.replace(':', '.')}.{word}" for name in NAMES for word in name.attributes.split()}
DOTTED = re.compile(r"sglang(\.\w+)+")


def is_listed(dotted: str) -> bool:
    return any(path == dotted or path.startswith(dotted + ".") for path in LISTED)


def sglang_names(source: Path) -> list[tuple[int, str]]:
    """SGLang names that a file imports, or names in a string (hook targets), with their lines; and the attributes that
    it reads of what it imports."""
    found = []
    imported = {}
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sglang":
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "sglang"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            found.append((node.lineno, node.value))
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            found.append((node.lineno, f"{imported[node.value.id]}.{node.attr}"))
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_name_used_is_in_the_table(source):
    missing = [f"line {line}: {name}" for line, name in sglang_names(source) if not is_listed(name)]
    assert not missing, f"add to compat.CONTRACT what {source.name} uses: {missing}"


def test_the_scan_sees_imports_and_hook_targets(tmp_path):
    source = tmp_path / "source.py"
    lines = ("import sglang.srt.a", "from sglang.srt.b import c as d", "TARGET = 'sglang.srt.e.f'", "d.g(torch.x)")
    source.write_text("\n".join(lines))
    assert sorted(sglang_names(source)) == [
        (1, "sglang.srt.a"),
        (2, "sglang.srt.b.c"),
        (3, "sglang.srt.e.f"),
        (4, "sglang.srt.b.c.g"),
    ]
    assert not any(is_listed(name) for _, name in sglang_names(source))


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_the_table_says_who_uses_a_name(name):
    last = name.path.rpartition(":")[2].split(".")[-1]
    if last == "forward":  # called through torch's Module.__call__
        last = "sampler("
    texts = {file: (PACKAGE / file).read_text(encoding="utf-8") for file in name.used_by.split()}
    words = [last, *name.attributes.split()]
    assert [file for file, text in texts.items() if not any(word in text for word in words)] == []
    unused = [word for word in name.attributes.split() if not any(word in text for text in texts.values())]
    assert not unused


def test_no_name_twice():
    assert len(PATHS) == len(NAMES)


# Problems


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23.post1", "0.5.23.dev4+gabc", "0.6.0"])
def test_another_version(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    (problem,) = compat.problems()
    assert version in problem and compat.SUPPORTED in problem and "pip install" in problem
    # The names are not even looked at.
    assert compat.contract_problems() == [problem]
    with pytest.raises(DDTreeError, match=re.escape(version)):
        compat.require_contract()


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23+cu130"])
def test_the_supported_version(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert compat.problems() == []


def test_sglang_not_installed(monkeypatch):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert "not installed" in compat.problems()[0]


def test_missing_names_are_named(monkeypatch):
    names = (Name("json:dumps", "a.py"), Name("json:no_such_name", "b.py"), Name("no_such_module_:x", "c.py"))
    monkeypatch.setattr(compat, "problems", list)
    monkeypatch.setattr(compat, "CONTRACT", names)
    first, second = compat.contract_problems()
    assert "json:no_such_name is missing" in first and "b.py" in first
    assert "no_such_module_:x cannot be imported" in second and "c.py" in second
    with pytest.raises(DDTreeError, match=r"json:no_such_name.* 1 more.*doctor") as error:
        compat.require_contract()
    assert "\n" not in str(error.value)


class Sample:
    constant = 1

    def __init__(self, one, two=2):
        self.value = one
        self.typed: int = two

    def method(self, *, key):
        return self.value == key and self.compared == 1


SAMPLE_SOURCE = inspect.getsource(Sample)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (Name("test_compat:Sample", "x", passes="one"), None),
        (Name("test_compat:Sample", "x", passes="one three"), "does not accept three"),
        (Name("test_compat:Sample", "x", signature="one two"), None),
        (Name("test_compat:Sample", "x", signature="one"), "has parameters (one two), expected (one)"),
        (Name("test_compat:Sample", "x", attributes="value typed method constant"), None),
        (Name("test_compat:Sample", "x", attributes="value other"), "does not set other"),
        (Name("test_compat:Sample.method", "x", signature="self key", attributes="value"), None),
        (Name("test_compat:Sample.method", "x", attributes="compared"), "does not set compared"),
        (Name("test_compat:Sample.method", "x", passes="other"), "does not accept other"),
        (Name("test_compat:Sample.missing", "x"), "is missing"),
        (Name("test_compat:Sample.constant", "x", signature=""), "is not callable"),
    ],
)
def test_check_name(name, problem, monkeypatch):
    monkeypatch.setattr(Sample, "__module__", "sglang.sample")
    monkeypatch.setattr(compat.inspect, "getsource", lambda cls: SAMPLE_SOURCE)
    found = check_name(name)
    assert found is None if problem is None else problem in found


def test_the_installed_sglang_keeps_the_contract():
    """The only test here that imports SGLang's model runner (half a minute)."""
    assert compat.contract_problems() == []
