"""``compat.CONTRACT`` checked against the source of an SGLang that is not installed, without importing it.

The same questions as ``compat.check_name`` asks, answered from syntax trees: imports are followed from module to
module, and class members through the bases. What only exists at run time is out of reach and is said to be missing.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree.compat import Name

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A definition, the module that holds it, and the class if it is a member."""

    node: ast.AST
    module: str
    owner: ast.ClassDef | None = None


class Sources:
    """The modules under one directory that holds ``sglang/``."""

    def __init__(self, root: Path):
        self.root = root

    @functools.cache  # noqa: B019 - one object, which lives as long as the program
    def module(self, name: str) -> ast.Module | None:
        """A module's syntax tree; None when there is no such file."""
        path = self.root.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, module: str, attribute: str) -> Found | None:
        """A dotted attribute of a module."""
        first, *rest = attribute.split(".")
        found = self._top(module, first)
        for part in rest:
            if found is None or not isinstance(found.node, ast.ClassDef):
                return None
            found = self._member(found, part)
        return found

    def _top(self, module: str, name: str) -> Found | None:
        tree = self.module(module)
        if tree is None:
            return None
        is_package = self.root.joinpath(*module.split("."), "__init__.py").is_file()
        package = module if is_package else module.rpartition(".")[0]
        statements = list(_flat(tree.body))
        for statement in statements:
            if isinstance(statement, Function | ast.ClassDef) and statement.name == name:
                return Found(statement, module)
        for statement in statements:
            if name in _assigned(statement):
                return Found(statement, module)
            if isinstance(statement, ast.ImportFrom) and (source := _imported(statement, name, package)):
                inner = self._top(*source)
                if inner is not None:
                    return inner
        return None

    def classes(self, found: Found) -> Iterator[Found]:
        """A class and its bases within SGLang, nearest first."""
        assert isinstance(found.node, ast.ClassDef)
        yield found
        for base in found.node.bases:
            above = self._top(found.module, base.id) if isinstance(base, ast.Name) else None
            if above is not None and isinstance(above.node, ast.ClassDef):
                yield from self.classes(above)

    def _member(self, found: Found, name: str) -> Found | None:
        for each in self.classes(found):
            assert isinstance(each.node, ast.ClassDef)
            for statement in _flat(each.node.body):
                if isinstance(statement, Function | ast.ClassDef) and statement.name == name:
                    return Found(statement, each.module, each.node)
                if name in _assigned(statement):
                    return Found(statement, each.module, each.node)
        return None

    def parameters(self, found: Found) -> list[str] | None:
        """Parameter names as ``inspect.signature`` gives them; None for what is not called."""
        if isinstance(found.node, Function):
            names = _arguments(found.node)
            return names[1:] if _has_decorator(found.node, "classmethod") else names
        if not isinstance(found.node, ast.ClassDef):
            return None
        bases = list(self.classes(found))
        for position, each in enumerate(bases):
            assert isinstance(each.node, ast.ClassDef)
            for statement in each.node.body:
                if isinstance(statement, Function) and statement.name == "__init__":
                    return _arguments(statement)[1:]
            if _makes_fields(each.node):
                # Those of the bases first; a name that comes again keeps its place.
                above = [base.node for base in bases[position:] if _makes_fields(base.node)]
                return list(dict.fromkeys(name for node in reversed(above) for name in _fields(node)))
        return []

    def attributes(self, found: Found) -> set[str]:
        """Everything a class or its bases define, or set on ``self`` somewhere."""
        names: set[str] = set()
        for each in self.classes(found):
            assert isinstance(each.node, ast.ClassDef)
            for statement in _flat(each.node.body):
                names |= _assigned(statement)
                if isinstance(statement, Function | ast.ClassDef):
                    names.add(statement.name)
            stored = (node for node in ast.walk(each.node) if isinstance(node, ast.Attribute))
            names |= {
                node.attr for node in stored if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
            }
        return names


def problem(sources: Sources, name: Name) -> str | None:
    """What is wrong with one name of the contract, or None."""
    module, _, attribute = name.path.partition(":")
    if sources.module(module) is None:
        return "its module is missing"
    found = sources.find(module, attribute)
    if found is None:
        return "is missing"
    if name.passes or name.signature is not None:
        parameters = sources.parameters(found)
        if parameters is None:
            return None
        if name.signature is not None and " ".join(parameters) != name.signature:
            return f"has parameters ({' '.join(parameters)}), expected ({name.signature})"
        if missing := [word for word in name.passes.split() if word not in parameters]:
            return f"does not accept {', '.join(missing)}"
    if name.attributes:
        owner = found if isinstance(found.node, ast.ClassDef) else sources.find(module, attribute.rpartition(".")[0])
        assert owner is not None
        if missing := sorted(set(name.attributes.split()) - sources.attributes(owner)):
            return f"does not set {', '.join(missing)}"
    return None


def undecided(sources: Sources, name: Name) -> bool:
    """Whether the parameters of a name that is there cannot be told from the source: it is the value of a call."""
    module, _, attribute = name.path.partition(":")
    found = sources.find(module, attribute)
    asked = name.passes or name.signature is not None
    return found is not None and bool(asked) and sources.parameters(found) is None


def body(sources: Sources, name: Name) -> str | None:
    """A name's definition as text without comments and layout, to compare two releases; None when it is missing."""
    module, _, attribute = name.path.partition(":")
    found = sources.find(module, attribute)
    return None if found is None else ast.unparse(found.node)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those inside of ``if``, ``try`` and ``with`` too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)


def _assigned(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def _imported(statement: ast.ImportFrom, name: str, package: str) -> tuple[str, str] | None:
    """Where ``from X import Y [as name]`` takes ``name`` from; ``package`` is the one that holds the statement."""
    for alias in statement.names:
        if statement.module and (alias.name == "*" or (alias.asname or alias.name) == name):
            parents = package.split(".")
            above = parents[: len(parents) - statement.level + 1] if statement.level else []
            return ".".join([*above, statement.module]), name if alias.name == "*" else alias.name
    return None


def _arguments(function: Function) -> list[str]:
    found = function.args
    names = [each.arg for each in (*found.posonlyargs, *found.args)]
    names += [found.vararg.arg] if found.vararg else []
    names += [each.arg for each in found.kwonlyargs]
    return names + ([found.kwarg.arg] if found.kwarg else [])


def _fields(node: ast.AST) -> list[str]:
    assert isinstance(node, ast.ClassDef)
    return [
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.unparse(statement.annotation)
        and "init=False" not in ast.unparse(statement)
    ]


def _makes_fields(node: ast.AST) -> bool:
    """Whether a class is a dataclass, a named tuple or a msgspec structure."""
    assert isinstance(node, ast.ClassDef)
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    return _has_decorator(node, "dataclass") or bool(bases & {"NamedTuple", "Struct"})


def _has_decorator(node: Function | ast.ClassDef, name: str) -> bool:
    called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return any(ast.unparse(each).split(".")[-1] == name for each in called)
