#!/usr/bin/env bash
# Pack this checkout and Python packages for a host without network, in files of at most 60 MiB.
#
# scripts/carry.sh [--limit MIB] [--python 3.12] [--with PATH]... OUT [REQUIREMENT or pip option]...
#   OUT        a new directory; carry every file in it, then run `bash install.sh` in it on the other side
#   --limit    largest file, in MiB (60)
#   --python   version of the other side's Python, which then is Linux on x86-64 with glibc 2.28 or newer
#   --with     a file or directory to carry as well: a model, FlashInfer's compiled modules (~/.cache/flashinfer)
# What follows OUT goes to `pip download`; a dependency that is there already is left out with --no-deps.
# install.sh checks every file, joins the parts, unpacks what is no package, and installs without network;
# PYTHON=/path/to/python chooses where, and its arguments go to `pip install`.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { echo "carry.sh: $*" >&2; exit 2; }
limit=60 python="" extra=()
while [[ "${1:-}" == -* ]]; do
  case "$1" in
    -h|--help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --limit|--python|--with) [ $# -ge 2 ] || fail "$1 needs a value" ;;&
    --limit) limit=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    --with) [ -e "$2" ] || fail "--with $2 is not there"; extra+=("$(realpath "$2")"); shift 2 ;;
    *) fail "unknown option $1 (see --help)" ;;
  esac
done
[ $# -ge 1 ] || fail "no output directory (see --help)"
[[ "$limit" =~ ^[1-9][0-9]*$ ]] || fail "--limit must be a whole number of MiB, got $limit"
out=$1; shift
[ ! -e "$out" ] || fail "$out exists already; give a new directory"

mkdir -p "$out"
out=$(realpath "$out")
trap 'rm -rf "$out"' EXIT
if [ $# -gt 0 ]; then
  target=()
  if [ -n "$python" ]; then
    target=(--python-version "$python" --implementation cp)
    for minor in $(seq 5 28); do target+=(--platform "manylinux_2_${minor}_x86_64"); done
    for old in manylinux2014 manylinux2010 manylinux1 linux; do target+=(--platform "${old}_x86_64"); done
  fi
  "${PYTHON:-python3}" -m pip download --only-binary :all: --dest "$out" "${target[@]}" "$@" >&2
fi
if git -C "$here" rev-parse HEAD >/dev/null 2>&1; then
  git -C "$here" archive --format=tar --prefix=sglang-ddtree/ -o "$out/sglang-ddtree.tar" HEAD
fi
for path in "${extra[@]}"; do tar -C "$(dirname "$path")" -cf "$out/with-$(basename "$path").tar" "$(basename "$path")"; done

cd "$out"
shopt -s nullglob
files=(*)
[ ${#files[@]} -gt 0 ] || fail "nothing to carry"
sha256sum -- "${files[@]}" > WHOLE.sha256
for file in "${files[@]}"; do
  if [ "$(stat -c %s -- "$file")" -gt $((limit << 20)) ]; then
    split -b "${limit}M" -d -a 4 -- "$file" "$file.part"
    rm -- "$file"
  fi
done
sha256sum -- * > PARTS.sha256
{
  echo '#!/usr/bin/env bash'
  echo '# Check, join, unpack and install what lies beside this file; made by carry.sh.'
  echo "list=$(sha256sum PARTS.sha256 | cut -d' ' -f1)"
  cat <<'INSTALL'
main() {
  set -euo pipefail
  shopt -s nullglob
  cd "$(dirname "${BASH_SOURCE[0]}")"
  fail() { echo "install.sh: $*" >&2; exit 1; }
  echo "$list  PARTS.sha256" | sha256sum --check --status 2>/dev/null || fail "PARTS.sha256 is missing or damaged; carry it again"
  local bad file parts wheels
  bad=$(sha256sum --check PARTS.sha256 2>/dev/null | sed -n 's/: FAILED.*//p' | paste -sd' ' || true)
  [ -z "$bad" ] || fail "missing or damaged, carry again: $bad"
  mkdir -p joined
  while read -r _ file; do
    parts=("$file".part*)
    if [ ${#parts[@]} -gt 0 ]; then cat "${parts[@]}" > "joined/$file"; else ln -f "$file" joined/ 2>/dev/null || cp "$file" joined/; fi
  done < WHOLE.sha256
  (cd joined && sha256sum --check --quiet ../WHOLE.sha256) || fail "joining failed; is the disk full?"
  for file in joined/*.tar; do tar -xf "$file" && echo "unpacked $file" >&2; done
  wheels=(joined/*.whl)
  if [ ${#wheels[@]} -gt 0 ]; then "${PYTHON:-python3}" -m pip install --no-index --find-links joined "$@" "${wheels[@]}"; fi
}
main "$@"
INSTALL
} > install.sh
trap - EXIT
echo "carry all $(ls | wc -l) files of $out ($(du -sm . | cut -f1) MiB), then there: bash install.sh" >&2
