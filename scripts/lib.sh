# Sourced by demo.sh and test.sh.

# Set $ENV to the environment's directory, built first if need be. In the background, so that a signal to this script
# also ends the build instead of waiting for it.
use_env() {
  local out pid status=0
  out=$(mktemp)
  "$here/scripts/env.sh" >"$out" &
  pid=$!
  trap 'kill $pid 2>/dev/null || true; wait $pid || true; rm -f "$out"; exit 130' INT TERM HUP
  wait $pid || status=$?
  trap - INT TERM HUP
  ENV=$(<"$out")
  rm -f "$out"
  [ $status -eq 0 ] || exit $status
}
