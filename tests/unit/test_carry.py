"""``scripts/carry.sh``: packages and files through parts to a directory without network. No network here either."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PYTHON": sys.executable, **env}
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=300, env=environ)


def make_wheel(directory: Path, name: str, payload: bytes, requires: str = "") -> None:
    """A wheel with one module that holds ``payload``, stored as it is."""
    directory.mkdir(exist_ok=True)
    meta = f"{name}-1.0.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}/__init__.py": b"",
        f"{name}/data.bin": payload,
        f"{meta}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}".encode(),
        f"{meta}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{meta}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{meta}/RECORD")).encode()
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


PAYLOAD = random.Random(1).randbytes(3 * MIB // 2)


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """A package of two parts, a small one that it needs, and a model directory."""
    top = tmp_path_factory.mktemp("carry")
    make_wheel(top / "wheels", "carried_large", PAYLOAD, requires="carried-small")
    make_wheel(top / "wheels", "carried_small", b"x")
    (top / "model").mkdir()
    (top / "model" / "weights").write_bytes(PAYLOAD[:100])
    options = ["--limit", "1", "--with", top / "model"]
    done = run(ROOT / "scripts" / "carry.sh", *options, top / "out", "carried-large", "--find-links", top / "wheels")
    assert done.returncode == 0, done.stderr
    return top / "out"


@pytest.fixture
def arrived(carried, tmp_path):
    """The files as they arrive: copies, in another place."""
    there = tmp_path / "there"
    there.mkdir()
    for file in carried.iterdir():
        (there / file.name).write_bytes(file.read_bytes())
    return there


def test_every_file_is_small_and_the_other_side_installs_it(arrived, tmp_path):
    assert all(file.stat().st_size <= MIB for file in arrived.iterdir())
    assert (arrived / "carried_large-1.0-py3-none-any.whl.part0001").exists()
    for _ in range(2):
        done = run("bash", arrived / "install.sh", "--target", tmp_path / "site", "--upgrade")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "site" / "carried_large" / "data.bin").read_bytes() == PAYLOAD
        assert (tmp_path / "site" / "carried_small").is_dir()
    assert (arrived / "model" / "weights").read_bytes() == PAYLOAD[:100]
    assert (arrived / "sglang-ddtree" / "scripts" / "gpu_check.py").exists()


@pytest.mark.parametrize("name", ["carried_large-1.0-py3-none-any.whl.part0001", "PARTS.sha256", "WHOLE.sha256"])
@pytest.mark.parametrize("harm", ["missing", "torn", "changed"])
def test_what_did_not_arrive_whole_is_named(arrived, tmp_path, name, harm):
    file = arrived / name
    text = file.read_bytes()
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(text[: len(text) // 2] if harm == "torn" else text[:-2] + b"!\n")
    done = run("bash", arrived / "install.sh", "--target", tmp_path / "site")
    assert done.returncode == 1 and not (tmp_path / "site").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("install.sh:") and name in line and "again" in line


def test_a_torn_installer_installs_nothing(arrived, tmp_path):
    file = arrived / "install.sh"
    file.write_bytes(file.read_bytes()[:900])
    done = run("bash", file, "--target", tmp_path / "site")
    assert done.returncode != 0 and not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no output directory"),
        (["--limit", "none", "out"], "whole number"),
        (["--with", "/nowhere", "out"], "/nowhere is not there"),
        (["--python"], "needs a value"),
        (["--nonsense", "out"], "--nonsense"),
        (["/tmp"], "exists already"),
    ],
)
def test_bad_arguments(arguments, reason):
    done = run(ROOT / "scripts" / "carry.sh", *arguments)
    assert done.returncode == 2 and reason in done.stderr


def test_a_package_that_is_nowhere(tmp_path):
    done = run(ROOT / "scripts" / "carry.sh", tmp_path / "out", "carried-nowhere")
    assert done.returncode != 0 and "carried-nowhere" in done.stderr and not (tmp_path / "out").exists()


def test_whole_files_are_what_was_downloaded(carried):
    """The two lists of checksums agree with the files; the parts make up the wheel."""
    listed = dict(reversed(line.split("  ")) for line in (carried / "WHOLE.sha256").read_text().splitlines())
    parts = sorted(carried.glob("carried_large-*.part*"))
    joined = b"".join(part.read_bytes() for part in parts)
    assert listed["carried_large-1.0-py3-none-any.whl"] == hashlib.sha256(joined).hexdigest()
