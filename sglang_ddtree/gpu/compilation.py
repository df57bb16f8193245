"""Compile every kernel for GPUs that are not there: Triton's own compiler and the ptxas of its wheel need no driver."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_ddtree.state_memory import QWEN36_27B
from sglang_ddtree.tree.kernels.build import build_constants, build_kernel
from sglang_ddtree.tree.kernels.delta_rule import fold_constants, fold_kernel, verify_constants, verify_kernel
from sglang_ddtree.tree.kernels.mask import bits_constants, bits_kernel, mask_constants, mask_kernel
from sglang_ddtree.tree.kernels.walk import walk_constants, walk_kernel

ARCHITECTURES = (80, 86, 90, 100, 120)
BUDGETS = (8, 16, 32, 64, 128, 256)

#: Arguments that are not int32.
_POINTERS = {
    **{name: "*fp32" for name in ("log_probs", "log_weights")},
    **{
        name: "*i64"
        for name in (
            *("token_ids", "root_tokens", "tokens", "parents", "depths", "next_child", "next_sibling", "num_nodes"),
            *("target_tokens", "accepted", "num_accepted", "bonus", "prefix_lens"),
        )
    },
}
#: Those of the delta rule: a server's inputs are bfloat16, states and sums float32; a pool's strides may be long.
_DELTA_RULE = {
    **{name: "*bf16" for name in ("q", "k", "v", "a", "b")},
    **{name: "*fp32" for name in ("a_log", "dt_bias", "out_key", "out_update", "out_decay", "key", "update", "decays")},
    **{name: "*i32" for name in ("slots", "rows", "links", "out_parents")},
    **{name: "*i64" for name in ("last", "track_slots", "track_last")},
    **{name: "i64" for name in ("state_layer", "state_slot", "state_stride", "key_layer", "update_layer")},
    **{"decay_layer": "i64", "scale": "fp32"},
}
#: Key heads, value heads and their sizes on one GPU: Qwen3.6-27B on one and on two.
DELTA_SHAPES = tuple(
    (QWEN36_27B.key_heads // gpus, QWEN36_27B.value_heads // gpus, QWEN36_27B.key_dim, QWEN36_27B.value_dim)
    for gpus in (1, 2)
)


@dataclass(frozen=True)
class Variant:
    """One kernel with the constants that :mod:`sglang_ddtree.tree.kernels` launches it with.

    Attributes:
        out: the type of an argument of that name.
        types: those of arguments that neither are in the table above nor int32.
    """

    name: str
    kernel: Any
    constants: dict[str, int]
    num_warps: int
    out: str
    types: dict[str, str] = field(default_factory=dict)

    def signature(self) -> dict[str, str]:
        types = {"out": self.out, "size": "i64", **(self.types or _POINTERS)}
        types |= {name: "constexpr" for name in self.constants}
        return {name: types.get(name, "i32") for name in self.kernel.arg_names}


@dataclass(frozen=True)
class Compiled:
    """What came out; bytes per program for shared memory, bytes per thread for the stack, where spills go."""

    name: str
    arch: int
    cubin_bytes: int
    registers: int
    shared: int
    stack: int


def variants(budgets: tuple[int, ...] = BUDGETS) -> Iterator[Variant]:
    """Every variant that serving with one of these budgets launches; K and the depth are run-time arguments."""
    seen = set()
    for budget in budgets:
        width = budget + 1
        for name, kernel, constants, out in (
            ("build", build_kernel, build_constants(1, budget), ""),
            ("bit rows", bits_kernel, bits_constants(1, width), "*i32"),
            ("mask", mask_kernel, mask_constants(1, width, has_prefix=False), "*u8"),
            ("full mask", mask_kernel, mask_constants(1, width, has_prefix=True), "*u8"),
            ("walk", walk_kernel, walk_constants(1, width), ""),
        ):
            key = (name, tuple(constants.items()))
            if key not in seen:
                seen.add(key)
                num_warps = constants.pop("num_warps")
                yield Variant(name, kernel, constants, num_warps, out)


def delta_variants() -> Iterator[Variant]:
    """The delta rule's kernels, which know no budget: for both shapes and both types of states."""
    for shape in DELTA_SHAPES:
        for states in ("*fp32", "*bf16"):
            types = {**_DELTA_RULE, "states": states}
            for name, kernel, constants, out in (
                ("delta rule, verify", verify_kernel, verify_constants(*shape, has_parents=True), "*bf16"),
                ("delta rule, commit", fold_kernel, fold_constants(*shape, has_track=False), ""),
                ("delta rule, commit and track", fold_kernel, fold_constants(*shape, has_track=True), ""),
            ):
                num_warps = constants.pop("num_warps")
                yield Variant(f"{name}, {states[1:]} states", kernel, constants, num_warps, out, types)


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compile down to machine code for ``sm_ARCH``.

    Raises:
        RuntimeError: no machine code came out, or its resources cannot be read.
    """
    source = ASTSource(variant.kernel, variant.signature(), constexprs=dict(variant.constants))
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": variant.num_warps})
    cubin = built.asm.get("cubin", b"")
    if f".target sm_{arch}" not in built.asm.get("ptx", "") or not cubin.startswith(b"\x7fELF"):
        raise RuntimeError(f"{variant.name} {variant.constants} gave no machine code for sm_{arch}")
    registers, stack = _resources(cubin)
    constants = ", ".join(f"{name} {int(value)}" for name, value in variant.constants.items())
    return Compiled(f"{variant.name} ({constants})", arch, len(cubin), registers, built.metadata.shared, stack)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of each thread, from cuobjdump."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {(done.stdout + done.stderr)[-200:]!r}")
    return int(found[1]), int(found[2])
