#!/usr/bin/env bash
# Serve a small real model with DDTREE on this machine, stream an answer, and compare with plain decoding and DFLASH.
#
# Does all its set-up itself (Python 3.11, pip and gcc suffice): environment, target model, prompts. Needs about 12 GB
# of disk, and 15 GB of free memory for three servers at once (5 GB one at a time). Nothing is left running.
#
#   --dtype float32|bfloat16  default float32, in which all three must give the same tokens
#   --budget N                tree nodes below the root (default 4)
#   --prompts N --tokens N    size of the comparison (default 6 prompts x 64 tokens)
#   --port N                  port of the DDTREE server on 127.0.0.1 (default: a free one)
#   --one-at-a-time           one server at a time; so by itself where memory is short
#   --keep                    leave the DDTREE server running and print how to use and stop it
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
for arg in "$@"; do
  case "$arg" in -h|--help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
done
. "$here/scripts/lib.sh"
use_env
exec "$ENV/bin/python" -m sglang_ddtree.demo.run "$@"
