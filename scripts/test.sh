#!/usr/bin/env bash
# Check everything: ruff, mypy and the whole test suite. Builds the environment first where there is none.
#
# Arguments go to pytest: scripts/test.sh -k tree
# With arguments the linters are left out, since only a part is being looked at.
# With --patched as the first one, SGLang is the installed one with all of patches/ in (a copy; nothing installed changes).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in -h|--help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
. "$here/scripts/lib.sh"
patched=
if [ "${1:-}" = --patched ]; then patched=1; shift; fi
use_env
cd "$here"
say() { printf '[test] %s\n' "$*" >&2; }

# The tests of `drafter push` copy through a real sshd and rsync; without them they fail, and say so.
missing() { ! command -v rsync || ! PATH=$PATH:/usr/sbin command -v sshd; } >/dev/null
if missing && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  say "installing rsync and openssh-server"
  { apt-get update && apt-get install -y --no-install-recommends rsync openssh-server; } >/dev/null 2>&1 || true
fi
if missing; then say "no rsync or no sshd: the tests of 'drafter push' will fail; install rsync and openssh-server"; fi

if [ $# -eq 0 ]; then
  say "ruff"
  "$ENV/bin/python" -m ruff check .
  "$ENV/bin/python" -m ruff format --check .
  say "mypy"
  "$ENV/bin/python" -m mypy
  # Two files at a time, each on one thread; each has two servers, which take 6 GB together.
  if [ "$(nproc)" -ge 2 ] && [ "$(awk '/MemAvailable/ {print $2}' /proc/meminfo)" -ge 20000000 ]; then
    export OMP_NUM_THREADS=1 SGLANG_DDTREE_CPU_THREADS=1
    set -- -n 2 --dist loadfile --durations 25
  fi
fi
if [ -n "$patched" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  PYTHONPATH=tests/engine "$ENV/bin/python" -c \
    'import sys, pathlib, patched_site; patched_site.make(pathlib.Path(sys.argv[1]))' "$site"
  export PYTHONPATH=$site
  say "patched SGLang, pytest $*"
  "$ENV/bin/python" -m pytest "$@"
  exit
fi
say "pytest $*"
exec "$ENV/bin/python" -m pytest "$@"
