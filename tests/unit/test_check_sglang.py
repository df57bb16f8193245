"""The contract checked against source alone: as the installed SGLang answers, and what a changed one breaks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from stock_sglang import copy_tree

from sglang_ddtree import compat
from sglang_ddtree.compat import Name
from sglang_ddtree.contract_sources import Sources, body, problem, undecided
from sglang_ddtree.patching import tree

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_sglang.py"


def test_the_installed_release_keeps_the_contract():
    sources = Sources(tree.find_package(None).parent)
    assert {name.path: found for name in compat.CONTRACT if (found := problem(sources, name))} == {}
    # Two values of calls; were it more, the check would be looking at nothing.
    assert sum(undecided(sources, name) for name in compat.CONTRACT) <= 2


@pytest.fixture
def sources(tmp_path):
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    files = {
        "__init__.py": "from .base import *\n",
        "base.py": """
            from dataclasses import dataclass
            import msgspec

            class Base:
                limit: int = 3
                def __init__(self, one, two=2, *rest, key, **more):
                    self.value: int = one
                    self.other, = [two]
                def method(self, a):
                    return self.value == self.read_only
                @classmethod
                def make(cls, b): ...

            @dataclass(frozen=True)
            class Point:
                x: int
                y: int = 0

            @dataclass
            class Space(Point):
                z: int = 0
                x: float = 0

            class Packed(msgspec.Struct, frozen=True):
                width: int

            try:
                from nowhere import fast
            except ImportError:
                def fast(q): ...

            made = make_function()
            """,
        "user.py": "from sglang.srt.base import Base as Renamed\nclass Child(Renamed):\n    def own(self): ...\n",
    }
    for name, text in files.items():
        (package / name).write_text(textwrap.dedent(text))
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (Name("sglang.srt.base:Base", "x", signature="one two rest key more"), None),
        (Name("sglang.srt.base:Base", "x", signature="one"), "has parameters (one two rest key more), expected (one)"),
        (Name("sglang.srt.base:Base", "x", passes="one gone"), "does not accept gone"),
        (Name("sglang.srt.base:Base", "x", attributes="value other limit method"), None),
        (Name("sglang.srt.base:Base", "x", attributes="read_only value"), "does not set read_only"),
        (Name("sglang.srt.base:Base.make", "x", signature="b"), None),
        (Name("sglang.srt.base:Base.limit", "x"), None),
        (Name("sglang.srt.base:Base.gone", "x"), "is missing"),
        (Name("sglang.srt.user:Child.method", "x", signature="self a", attributes="value own"), None),
        (Name("sglang.srt.user:Renamed.method", "x", signature="self a"), None),
        (Name("sglang.srt:Base", "x", passes="key"), None),
        (Name("sglang.srt.base:Space", "x", signature="x y z"), None),
        (Name("sglang.srt.base:Packed", "x", signature="width"), None),
        (Name("sglang.srt.base:fast", "x", signature="q"), None),
        (Name("sglang.srt.gone:fast", "x"), "its module is missing"),
        (Name("sglang.srt.base:made", "x", signature="q"), None),
    ],
)
def test_problem(sources, name, expected):
    assert problem(sources, name) == expected
    assert undecided(sources, name) == name.path.endswith(":made")


def test_body_ignores_comments_and_layout(sources, tmp_path):
    name = Name("sglang.srt.base:Base.method", "x")
    before = body(sources, name)
    file = tmp_path / "sglang" / "srt" / "base.py"
    file.write_text(file.read_text().replace("def method(self, a):", "def method(self,\n               a):  # read"))
    assert body(Sources(tmp_path), name) == before
    file.write_text(file.read_text().replace("self.read_only", "self.written"))
    assert body(Sources(tmp_path), name) != before


def wheel(directory: Path, package: Path) -> Path:
    file = directory / "sglang-0.5.99-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package.parent))
        archive.writestr("sglang-0.5.99.dist-info/METADATA", "")
    return file


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_the_report_names_what_breaks_and_who_uses_it(tmp_path):
    package = copy_tree(tmp_path / "new" / "sglang")
    registry = package / "srt/speculative/spec_registry.py"
    registry.write_text(registry.read_text().replace("def need_topk", "def need_top_k").replace("factory", "maker"))
    worker = package / "srt/speculative/dflash_worker_v2.py"
    worker.write_text(
        worker.read_text().replace("def _draft_write_ids(self, plan", "def _draft_write_ids(self, plan, kind")
    )
    out = tmp_path / "report.md"
    done = check(wheel(tmp_path, package), "--output", out)
    assert done.returncode == 1, done.stderr
    report = out.read_text()
    assert report.startswith("# SGLang 0.5.99 ")
    line = next(line for line in report.splitlines() if "_draft_write_ids" in line)
    assert "has parameters (self plan kind), expected (self plan)" in line and "worker.py" in line
    assert "CustomSpecAlgo` has parameters (name maker" in report
    assert "`0002-custom-spec-algo`: srt/speculative/spec_registry.py is different" not in report
    assert "`sglang.srt.runtime_context:get_spec` its module is missing" in report


def test_no_wheel(tmp_path):
    file = tmp_path / "sglang-1.whl"
    file.write_text("not a zip")
    done = check(file)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "not a wheel" in done.stderr
