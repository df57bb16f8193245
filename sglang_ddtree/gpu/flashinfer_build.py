"""Compile FlashInfer's tree variant for GPUs that are not there: one kernel file, no driver, nothing is loaded."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_ddtree.attention.flashinfer_tree import Variant, jit_args, jit_kwargs

ARCHITECTURES = ("86", "90a", "120")

#: One head size and cache of each kind, with everything that the variant can do, and with nothing.
VARIANTS = (
    Variant(torch.bfloat16, torch.bfloat16, 128),
    Variant(torch.bfloat16, torch.float8_e4m3fn, 128, soft_cap=True, window=True),
)


@dataclass(frozen=True)
class Built:
    """A cubin of the paged kernel with this variant's mask."""

    name: str
    arch: str
    cubin_bytes: int


def find_nvcc() -> Path:
    """``nvcc`` from the ``nvidia-cuda-nvcc`` wheel, which SGLang's dependencies bring, or from PATH.

    Raises:
        FileNotFoundError: neither is there.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(root).glob("cu*/bin/nvcc")):
            return found
    on_path = shutil.which("nvcc")
    if on_path is None:
        raise FileNotFoundError("no nvcc: pip install nvidia-cuda-nvcc (13.x), or put a CUDA toolkit on PATH")
    return Path(on_path)


def build(variant: Variant, arch: str, directory: Path) -> Built:
    """Compile the file with the kernels of ``variant`` for ``sm_ARCH``; FlashInfer compiles it and nine more.

    Args:
        directory: an empty one; sources and the cubin go there.

    Raises:
        RuntimeError: it does not compile; the compiler's errors.
    """
    source = write_sources(variant, directory)
    cubin = directory / f"sm_{arch}.cubin"
    done = subprocess.run(command(source, arch, cubin), capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).splitlines()
        errors = [line.strip() for line in said if "error" in line] or said[-5:]
        raise RuntimeError(f"{variant.name} for sm_{arch}: " + "; ".join(errors)[:800])
    return Built(variant.name, arch, cubin.stat().st_size)


def write_sources(variant: Variant, directory: Path) -> Path:
    """FlashInfer's generated sources of the module, under ``directory``; the file with the masked paged kernel, cut to
    one query tile size."""
    from flashinfer.jit import env
    from flashinfer.jit.attention import gen_customize_batch_prefill_module
    from flashinfer.jit.core import current_compilation_context as target

    # The generator wants to know a GPU, and there is none; the flags that come of it are not used.
    before = env.FLASHINFER_GEN_SRC_DIR, target.TARGET_CUDA_ARCHS
    env.FLASHINFER_GEN_SRC_DIR, target.TARGET_CUDA_ARCHS = directory, {(9, "0a")}
    try:
        gen_customize_batch_prefill_module("fa2", *jit_args(variant), **jit_kwargs())
    finally:
        env.FLASHINFER_GEN_SRC_DIR, target.TARGET_CUDA_ARCHS = before
    source = directory / variant.name / "batch_prefill_paged_kernel_mask_2.cu"
    keep_one_tile(source)
    return source


def keep_one_tile(source: Path) -> None:
    """Leave one of the file's query tile sizes: the variant's code is the same in all, and each takes half a minute.

    Raises:
        RuntimeError: FlashInfer's file does not look as expected.
    """
    head, *kernels = source.read_text().split("template cudaError_t ")
    tail = "};  // namespace flashinfer"
    if len(kernels) != 3 or tail not in kernels[-1]:
        raise RuntimeError(f"{source.name} has {len(kernels)} kernels, expected those of 3 query tile sizes")
    source.write_text(f"{head}template cudaError_t {kernels[0]}\n{tail}\n")


def command(source: Path, arch: str, cubin: Path) -> list[str]:
    """The ``nvcc`` call, with FlashInfer's own includes and flags."""
    import tvm_ffi
    from flashinfer.jit import env
    from flashinfer.jit.core import common_nvcc_flags

    includes = [*env.CCCL_INCLUDE_DIRS, env.FLASHINFER_INCLUDE_DIR, env.FLASHINFER_CSRC_DIR, source.parent]
    includes += [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    includes += [*env.CUTLASS_INCLUDE_DIRS, env.SPDLOG_INCLUDE_DIR, sysconfig.get_path("include")]
    flags = [flag for flag in common_nvcc_flags if not flag.startswith("-gencode")]
    # The wheels of nvcc and of the headers are a minor version apart, which CCCL would refuse.
    flags.append("-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK")
    line = [str(find_nvcc()), "-cubin", f"-arch=sm_{arch}", "-std=c++20", "-O1", "--expt-relaxed-constexpr", *flags]
    line += [f"-I{path}" for path in includes]
    return [*line, "-o", str(cubin), str(source)]
