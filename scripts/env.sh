#!/usr/bin/env bash
# Build or reuse the Python environment of this checkout and print its directory on stdout.
#
# Two virtual environments, both under $SGLANG_DDTREE_CACHE (default ~/.cache/sglang-ddtree), never in the checkout:
#   deps-HASH       everything pyproject.toml asks for (about 11 GB), keyed by a hash of those requirements,
#                   so that every checkout and every run with the same requirements shares it
#   env-HASH-PATH   this checkout, installed in editable mode, on top of deps-HASH (a few kB)
# Progress goes to stderr. Options: --python PATH (default python3.11, then python3).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${SGLANG_DDTREE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-ddtree}
python=""
while [ $# -gt 0 ]; do
  case "$1" in
    --python) [ $# -ge 2 ] || { echo "env.sh: --python needs a value" >&2; exit 2; }; python=$2; shift 2 ;;
    -h|--help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "env.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
say() { printf '[env] %s\n' "$*" >&2; }

if [ -z "$python" ]; then
  python=$(command -v python3.11 || command -v python3 || true)
  [ -n "$python" ] || { echo "env.sh: no python3 found; install Python 3.11" >&2; exit 1; }
fi
"$python" -c '' 2>/dev/null || { echo "env.sh: $python is no Python that runs; give another one with --python" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "env.sh: $python is older than Python 3.11; give another one with --python" >&2; exit 1; }
"$python" -c 'import venv, ensurepip' 2>/dev/null || {
  echo "env.sh: $python has no venv module; install python3-venv" >&2; exit 1; }

# The requirements are read from pyproject.toml, the one place that names versions.
requirements=$("$python" - "$here/pyproject.toml" <<'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
wanted = set(project["dependencies"])
for extra in project["optional-dependencies"].values():
    wanted.update(extra)
print("\n".join(sorted(wanted)))
PY
)
key=$({ echo "$requirements"; "$python" -c 'import sys, platform; print(sys.version_info[:2], platform.machine())'; } \
  | sha256sum | cut -c1-12)
deps=$cache/deps-$key
env=$cache/env-$key-$(printf %s "$here" | sha256sum | cut -c1-8)

mkdir -p "$cache"
exec 9>"$cache/env.lock"
flock -n 9 || { say "waiting for another env.sh"; flock 9; }

if [ ! -e "$deps/.ready" ]; then
  say "building $deps (about 6 minutes and 11 GB the first time)"
  rm -rf "$deps"
  "$python" -m venv "$deps"
  log=$cache/deps-$key.log
  printf '%s\n' "$requirements" > "$deps/requirements.txt"
  start=$SECONDS
  # 9>&- : a stopped env.sh must not leave the lock with its children.
  "$deps/bin/python" -m pip install --no-input -r "$deps/requirements.txt" >"$log" 2>&1 9>&- &
  pip=$!
  trap 'kill $pip 2>/dev/null || true' EXIT INT TERM
  while kill -0 $pip 2>/dev/null; do
    sleep 1
    if [ $(( (SECONDS - start) % 20 )) -eq 0 ]; then
      say "$((SECONDS - start)) s, $(du -sm "$deps" 2>/dev/null | cut -f1) MB: $(tail -n 1 "$log" | cut -c1-90)"
    fi
  done
  trap - EXIT INT TERM
  wait $pip || { tail -n 20 "$log" >&2; echo "env.sh: pip install failed, its log is $log" >&2; exit 1; }
  touch "$deps/.ready"
  say "built in $((SECONDS - start)) s"
fi

if [ ! -e "$env/.ready" ] || [ "$here/pyproject.toml" -nt "$env/.ready" ]; then
  say "installing this checkout into $env"
  # Never deleted, only completed: servers may be running from it.
  [ -e "$env/bin/python" ] || "$python" -m venv --without-pip "$env"
  site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  deps_site=$("$deps/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # addsitedir, not a bare path: the .pth files of the dependencies must be read too.
  echo "import site; site.addsitedir('$deps_site')" > "$site/deps.pth"
  "$env/bin/python" -m pip install --no-input --quiet --no-deps --no-build-isolation -e "$here" >&2 9>&-
  touch "$env/.ready"
fi
echo "$env"
