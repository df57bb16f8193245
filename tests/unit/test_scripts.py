"""The shell scripts, without building any environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELL = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_syntax(script):
    done = run("bash", "-n", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["env.sh", "demo.sh", "test.sh", "carry.sh"])
def test_help_and_mode(name):
    script = ROOT / "scripts" / name
    assert os.access(script, os.X_OK)
    done = run(script, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert len(done.stdout.splitlines()) >= 3
    assert not any(line.startswith("#") or line.startswith("set -") for line in done.stdout.splitlines())


def test_ci_calls_test_sh():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


def test_env_refuses_what_it_does_not_know():
    done = run(ROOT / "scripts" / "env.sh", "--nonsense")
    assert done.returncode == 2 and "--nonsense" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--python"], "needs a value"), (["--python", "/no/such"], "no Python that runs")]
)
def test_env_refuses_a_python_that_is_not_there(arguments, message):
    done = run(ROOT / "scripts" / "env.sh", *arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("env.sh: ") and message in done.stderr


def test_env_refuses_an_old_python(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ -z "$2" ]\n')
    old.chmod(0o755)
    done = run(ROOT / "scripts" / "env.sh", "--python", old)
    assert done.returncode == 1 and "older than Python 3.11" in done.stderr


def fake_environment(checkout: Path, cache: Path) -> str:
    """Run env.sh of ``checkout`` with a pip that only leaves a mark; returns what it printed."""
    done = run(
        checkout / "scripts" / "env.sh",
        "--python",
        checkout / "python",
        env={**os.environ, "SGLANG_DDTREE_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose python makes an empty environment instead of a real one."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "env.sh", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    real = shutil.which("python3")
    fake = root / "python"
    fake.write_text(
        f"""#!/usr/bin/env bash
if [ "$1" = -m ] && [ "$2" = venv ]; then
  target="${{@: -1}}"; mkdir -p "$target/bin"; cp "$0" "$target/bin/python"; exit 0
fi
[ "$1" = -m ] && [ "$2" = pip ] && exit 0
site=$(dirname "$0")/../site
[ "$1" = -c ] && [[ "$2" == *purelib* ]] && {{ mkdir -p "$site"; echo "$site"; exit 0; }}
exec {real} "$@"
"""
    )
    fake.chmod(0o755)
    return root


def test_the_environment_depends_on_the_requirements_only(checkout, tmp_path):
    cache = tmp_path / "cache"
    first = fake_environment(checkout, cache)
    assert first == fake_environment(checkout, cache)
    key = Path(first).name.split("-")[1]
    assert (cache / f"deps-{key}" / ".ready").exists()

    project = checkout / "pyproject.toml"
    project.write_text(project.read_text().replace("line-length = 120", "line-length = 100"))
    assert fake_environment(checkout, cache) == first

    project.write_text(project.read_text().replace('"safetensors",', '"safetensors>=0.5",'))
    assert Path(fake_environment(checkout, cache)).name.split("-")[1] != key


def test_a_signal_ends_the_build_too(checkout):
    """TERM to demo.sh while env.sh builds: both end, and at once."""
    shutil.copy(ROOT / "scripts" / "lib.sh", checkout / "scripts")
    (checkout / "scripts" / "env.sh").write_text(
        "#!/bin/bash\necho $$ >&2\ntrap 'kill %1; exit 1' TERM\nsleep 60 &\nwait\n"
    )
    script = f"here={checkout}; . {checkout}/scripts/lib.sh; use_env; echo unreachable"
    started = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    builder = int(started.stderr.readline())
    started.terminate()
    out, _ = started.communicate(timeout=30)
    assert started.returncode == 130 and out == ""
    with pytest.raises(ProcessLookupError):
        os.kill(builder, 0)


def test_two_checkouts_share_the_dependencies(checkout, tmp_path):
    cache = tmp_path / "cache"
    other = tmp_path / "other"
    shutil.copytree(checkout, other)
    one, two = (Path(fake_environment(root, cache)).name.split("-") for root in (checkout, other))
    assert one[1] == two[1] and one[2] != two[2]
    assert len(list(cache.glob("deps-*/.ready"))) == 1
