#!/usr/bin/env bash
# Check everything: ruff, mypy and the whole test suite. Builds the environment first where there is none.
#
# Arguments go to pytest: scripts/test.sh -k tree
# With arguments the linters are left out, since only a part is being looked at.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in -h|--help) sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
. "$here/scripts/lib.sh"
use_env
cd "$here"
say() { printf '[test] %s\n' "$*" >&2; }

if [ $# -eq 0 ]; then
  say "ruff"
  "$ENV/bin/python" -m ruff check .
  "$ENV/bin/python" -m ruff format --check .
  say "mypy"
  "$ENV/bin/python" -m mypy
fi
say "pytest"
exec "$ENV/bin/python" -m pytest "$@"
