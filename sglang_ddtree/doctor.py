"""``sglang-ddtree doctor``: would DDTREE start here, and if not, what to do about it.

Every check is a function that returns a ``Check`` and raises nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_ddtree import __version__, compat
from sglang_ddtree.errors import DDTreeError, of_the_system

_VARIABLES = "SGLANG_DDTREE_"
#: Not a server's: where the scripts keep environments and downloads, and what workers are told.
_OTHER_VARIABLES = {"SGLANG_DDTREE_CACHE", "SGLANG_DDTREE_ACTIVE"}

#: SGLang's own.
DEFAULT_PORT = 30000


@dataclass(frozen=True)
class Check:
    """One line of the report; ``ok=False`` means that DDTREE would not start. ``advice`` says what to do."""

    name: str
    ok: bool
    detail: str
    advice: str = ""


def run_doctor(model: str | None, drafter: str | None, port: int = DEFAULT_PORT, *, as_json: bool = False) -> int:
    """Print all checks; returns 0 when DDTREE would start, 1 when it would not."""
    # SGLang and its dependencies print while they are imported; the report alone belongs on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        checks = list(all_checks(model, drafter, port))
    ok = all(check.ok for check in checks)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(render(checks, colour=sys.stdout.isatty()), end="")
    return 0 if ok else 1


def render(checks: list[Check], *, colour: bool = False) -> str:
    """The report as text, one line per check and one more for its advice."""
    red, reset = ("\033[31m", "\033[0m") if colour else ("", "")
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        start, end = ("ok  ", "") if check.ok else (f"{red}FAIL", reset)
        lines.append(f"{start}  {check.name:<{width}}  {check.detail}{end}")
        if check.advice:
            lines.append(f"      {'':<{width}}  -> {check.advice}")
    failed = sum(not check.ok for check in checks)
    verdict = f"DDTREE would not start: {failed} of {len(checks)} checks failed." if failed else "DDTREE would start."
    lines.append(verdict)
    return "\n".join(lines) + "\n"


def all_checks(model: str | None, drafter: str | None, port: int = DEFAULT_PORT) -> Iterator[Check]:
    yield Check("sglang-ddtree", True, f"{__version__} in {Path(__file__).parent}")
    version = check_version()
    yield version
    if version.ok:
        yield check_contract()
        yield check_patches()
        plugin = check_plugin()
        yield plugin
        if plugin.ok:
            yield check_hooks()
    yield check_variables()
    yield check_torch()
    yield check_device()
    if _on_our_cpu_platform():
        yield check_threads()
        yield check_bf16()
    yield check_port(port)
    yield check_attention_backend()
    if not _on_our_cpu_platform():
        yield check_tree_mask()
    if model is None or drafter is None:
        return
    pair = check_drafter(model, drafter)
    yield from pair
    if version.ok and all(check.ok for check in pair):
        yield check_arguments(model, drafter)


def _on_our_cpu_platform() -> bool:
    from sglang_ddtree.cli import CPU_PLATFORM

    return os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM


def _guarded(name: str, advice: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # Whatever breaks in SGLang or torch, the other checks must still be printed.
        return Check(name, False, f"{type(error).__name__}: {' '.join(str(error).split())}", advice)


def check_version() -> Check:
    found = compat.problems()
    if found:
        return Check("sglang", False, found[0].removesuffix(f": {compat.ADVICE}"), compat.ADVICE)
    return Check("sglang", True, importlib.metadata.version("sglang"))


def check_contract() -> Check:
    found = compat.contract_problems()
    if found:
        return Check(
            "contract",
            False,
            "; ".join(found),
            f"this SGLang differs from the released {compat.SUPPORTED}; reinstall it: "
            f"pip install --force-reinstall --no-deps sglang=={compat.SUPPORTED}",
        )
    return Check("contract", True, f"{len(compat.CONTRACT)} SGLang names are as expected")


def check_plugin() -> Check:
    return _guarded("plugin", "reinstall sglang-ddtree in this environment: pip install -e .", _check_plugin)


def _check_plugin() -> Check:
    entries = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if "ddtree" not in entries.names:
        return Check(
            "plugin",
            False,
            "sglang-ddtree is not installed in SGLang's environment, so SGLang cannot find it",
            f"{sys.executable} -m pip install -e .",
        )
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "ddtree" not in [name.strip() for name in allowed.split(",")]:
        return Check(
            "plugin", False, f"SGLANG_PLUGINS={allowed} leaves ddtree out", f"set SGLANG_PLUGINS={allowed},ddtree"
        )
    chosen = os.environ.get("SGLANG_PLATFORM")
    ours = [entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.platforms") if _is_ours(entry)]
    if chosen and ours and chosen not in ours:
        return Check(
            "plugin",
            False,
            f"SGLANG_PLATFORM={chosen} makes SGLang skip the plugins of every other platform package, ddtree's too",
            f"unset SGLANG_PLATFORM, or set it to {ours[0]}",
        )

    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    try:
        algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    except ValueError:
        return Check(
            "plugin",
            False,
            "the plugin is installed but registered nothing",
            "read the error that SGLang logged above ('Failed to load plugin ddtree' or 'Failed to execute ...')",
        )

    from sglang_ddtree.algorithm import DDTreeAlgorithm

    if not isinstance(algorithm, DDTreeAlgorithm):
        return Check("plugin", False, "DDTREE registered itself as refused", "read the error logged above")
    return Check("plugin", True, "DDTREE is registered with SGLang")


def _is_ours(entry: importlib.metadata.EntryPoint) -> bool:
    return entry.dist is not None and entry.dist.name == "sglang-ddtree"


def check_patches() -> Check:
    return _guarded("patches", "see docs/install.md", _check_patches)


def _check_patches() -> Check:
    from sglang_ddtree.patching import series, tree

    patches = series.load()
    files = tree.read_files(tree.find_package(None), patches, series.pristine_hashes())
    states = tree.patch_states(patches, files)
    if modified := tree.modified(files):
        # The contract says whether DDTREE minds.
        return Check(
            "patches",
            True,
            f"SGLang's files differ from the release and from our patches: {', '.join(modified)}",
            f"if that is not meant: pip install --force-reinstall --no-deps sglang=={compat.SUPPORTED}",
        )
    if "partly applied" in states.values():
        return Check("patches", False, "a patch is half applied", "sglang-ddtree patch apply, or revert")
    applied = [name for name, state in states.items() if state == "applied"]
    return Check("patches", True, ", ".join(applied) if applied else "none applied (none is needed)")


def check_hooks() -> Check:
    return _guarded("hooks", "read the error that SGLang logged above", _check_hooks)


def _check_hooks() -> Check:
    from sglang_ddtree import hook_probe

    asked = hook_probe.ask_scheduler()
    if asked.missing:
        return Check(
            "hooks",
            False,
            f"a scheduler process has not applied {', '.join(asked.missing)}",
            "another plugin may replace the same function: set SGLANG_PLUGINS=ddtree to leave the others out",
        )
    away = f", {asked.unneeded} made unneeded by patches" if asked.unneeded else ""
    return Check("hooks", True, f"{asked.applied} in place in a scheduler process{away}")


def check_port(port: int) -> Check:
    """Whether a server could listen there, on SGLang's default address."""
    if not 1 <= port <= 65535:
        return Check("port", False, f"{port} is no port: they go from 1 to 65535", "serve with another --port")
    with socket.socket() as probe:
        # As servers do: a port whose last connections linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check("port", False, f"{port} cannot be used: {error}", "serve with another --port")
    return Check("port", True, f"{port} is free")


def check_variables() -> Check:
    """``SGLANG_DDTREE_*``: values that a server would refuse, and names that nothing reads."""
    return _guarded("variables", "see docs/flags.md", _check_variables)


def _check_variables() -> Check:
    from sglang_ddtree import config, flags, state_form
    from sglang_ddtree.attention import flashinfer_choice
    from sglang_ddtree.cpu import linear_choice

    mine = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    readers: list[Callable[[], object]] = [
        lambda: config.resolve_budget(None, config.DEFAULT_BUDGET),
        state_form.wanted,
        flashinfer_choice.wanted,
    ]
    if _on_our_cpu_platform():
        readers.append(linear_choice.packed_is_wanted)
    for read in readers:
        try:
            read()
        except DDTreeError as error:
            return Check("variables", False, str(error), "correct it or unset it")
    known = {flag.name for flag in flags.VARIABLES} | _OTHER_VARIABLES
    if unknown := [name for name in mine if name not in known]:
        there_are = ", ".join(sorted(name for name in known if name.startswith(_VARIABLES)))
        return Check("variables", True, f"nothing reads {', '.join(unknown)}", f"there are {there_are}")
    return Check("variables", True, ", ".join(f"{name}={os.environ[name]}" for name in mine) or "none set")


def check_torch() -> Check:
    import torch

    return Check("torch", True, f"{torch.__version__}, Python {platform.python_version()}")


def check_device() -> Check:
    return _guarded("device", "see SGLang's installation guide for this device", _check_device)


def _check_device() -> Check:
    import torch

    from sglang_ddtree.cli import accelerator

    chosen = os.environ.get("SGLANG_PLATFORM")
    if _on_our_cpu_platform():
        return Check("device", True, f"cpu ({platform.machine()}), platform {chosen}")
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return Check(
            "device",
            False,
            "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine, which has no tree verification for DDTREE",
            "unset SGLANG_USE_CPU_ENGINE; sglang-ddtree serve then selects its own CPU platform",
        )
    if chosen:
        return Check("device", True, f"platform {chosen}, chosen by SGLANG_PLATFORM", "DDTREE is not tested there")
    kind = accelerator()
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return Check("device", True, f"cuda: {torch.cuda.get_device_name()} (compute capability {major}.{minor})")
    return Check("device", True, str(kind), "DDTREE is tested on CUDA and on CPUs only")


def check_threads() -> Check:
    return _guarded("threads", "set OMP_NUM_THREADS to the number of cores to use", _check_threads)


def _check_threads() -> Check:
    from sglang_ddtree.cpu.threads import choose

    plan = choose()
    return Check("threads", True, f"{plan.count}: {plan.reason}")


def check_bf16() -> Check:
    """How bfloat16, the dtype of most checkpoints, runs here. Never a reason not to start."""
    return _guarded("bf16", "unset SGLANG_DDTREE_CPU_LINEAR", _check_bf16)


def _check_bf16() -> Check:
    from sglang_ddtree.cpu.linear_choice import ENV, packed_is_wanted

    native = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in cpu_flags()]
    detail = f"native ({', '.join(native)})" if native else "no bfloat16 instructions in this CPU"
    if packed_is_wanted():
        return Check("bf16", True, f"{detail}; linear layers run as packed fp16 products")
    advice = (
        "" if native else f"unset {ENV} if it is torch, or try --dtype float32: torch's bf16 products are slow here"
    )
    return Check("bf16", True, f"{detail}; linear layers run as torch's products", advice)


def cpu_flags() -> set[str]:
    """Instruction set names of the first CPU; empty where the system does not list them (anything but Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def check_attention_backend() -> Check:
    return _guarded("attention", "give --attention-backend flashinfer or triton", _check_attention_backend)


def _check_attention_backend() -> Check:
    from sglang_ddtree.algorithm import TREE_BACKENDS
    from sglang_ddtree.cpu.plugin import ATTENTION_BACKEND

    if _on_our_cpu_platform():
        return Check("attention", True, f"{ATTENTION_BACKEND} (ours, reads tree masks)")
    problem = flashinfer_problem()
    if problem is not None:
        return Check(
            "attention",
            False,
            f"flashinfer, the default, {problem}",
            "reinstall it, or serve with --attention-backend triton",
        )
    return Check(
        "attention",
        True,
        f"{TREE_BACKENDS[0]} {importlib.metadata.version('flashinfer-python')} unless --attention-backend says "
        f"otherwise (these read tree masks: {', '.join(TREE_BACKENDS)})",
    )


def check_tree_mask() -> Check:
    """Which mask FlashInfer would verify with. The target's layers and the compiler have the last word, at start."""
    return _guarded("tree mask", "unset SGLANG_DDTREE_FLASHINFER", _check_tree_mask)


def _check_tree_mask() -> Check:
    from sglang_ddtree.attention import flashinfer_choice as choice

    wanted, against = choice.wanted(), choice.against_host()
    if wanted == "stock":
        return Check("tree mask", True, f"SGLang's custom_mask ({choice.ENV}=stock)")
    if against is None:
        return Check("tree mask", True, "with flashinfer: bit rows, if the target's layers allow it; the log says")
    if wanted == "tree":
        return Check("tree mask", False, f"{choice.ENV}=tree, and {against}", f"unset {choice.ENV}")
    return Check("tree mask", True, f"with flashinfer: SGLang's custom_mask, because {against}")


def flashinfer_problem() -> str | None:
    """Why FlashInfer's masked prefill could not be used, or None; its kernels are compiled at the first start."""
    try:
        installed = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    wanted = [Requirement(text) for text in importlib.metadata.requires("sglang") or ()]
    for requirement in wanted:
        if canonicalize_name(requirement.name) == "flashinfer-python" and installed not in requirement.specifier:
            return f"is {installed}, and SGLang needs {requirement.specifier}"
    try:
        module = importlib.import_module("flashinfer")
    except Exception as error:  # It loads CUDA libraries, which fail in many ways.
        return f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
    return None if hasattr(module, "BatchPrefillWithPagedKVCacheWrapper") else "has no paged prefill"


def check_drafter(model: str, drafter: str) -> list[Check]:
    """The files of both models; one check per finding."""
    from sglang_ddtree.drafter.check import findings
    from sglang_ddtree.drafter.files import resolve_model_dir

    try:
        draft_dir = resolve_model_dir(drafter, weights=True)
        target_dir = resolve_model_dir(model)
    except (DDTreeError, OSError) as error:
        return [_from_error("drafter", of_the_system(error) if isinstance(error, OSError) else str(error))]
    found = findings(draft_dir, target_dir)
    if not found:
        return [Check("drafter", True, f"{drafter} fits {model}")]
    return [
        _from_error("drafter", finding.text) if finding.level == "error" else Check("drafter", True, finding.text)
        for finding in found
    ]


def _from_error(name: str, text: str) -> Check:
    """Our errors read 'what is wrong: what to do.'"""
    what, separator, advice = text.rpartition(": ")
    return Check(name, False, what, advice) if separator else Check(name, False, text, "see docs")


def check_arguments(model: str, drafter: str) -> Check:
    """SGLang's whole argument resolution with both models, as the server does it before it loads them."""
    return _guarded("arguments", "correct what the message names", lambda: _check_arguments(model, drafter))


def _check_arguments(model: str, drafter: str) -> Check:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    flags = ["--model-path", model, "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", drafter]
    server_args = prepare_server_args(flags)
    try:
        server_args.resolve_once()
    except DDTreeError as error:
        return _from_error("arguments", str(error))
    args = resolving_view(server_args)
    return Check(
        "arguments",
        True,
        f"attention {args.decode_attention_backend or args.attention_backend}, "
        f"budget {args.speculative_num_draft_tokens - 1}, block size {args.speculative_dflash_block_size}, "
        f"top-k {args.speculative_eagle_topk}, at most {args.max_running_requests} running requests",
    )
