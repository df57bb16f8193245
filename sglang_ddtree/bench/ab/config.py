"""What a run is made of: arms, loads, prompts and the method; from flags, from a TOML file, or both."""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_ddtree.bench.arms import make_arms
from sglang_ddtree.bench.prompts import SETS, SPLITS
from sglang_ddtree.errors import DDTreeError


class ConfigError(DDTreeError):
    """Bad input to the benchmark; the message is one line."""


@dataclass(frozen=True)
class Arm:
    """One server that is measured: either ``flags`` to start it with, or the ``url`` where it runs.

    Attributes:
        name: as the report shows it.
        flags: what the arm's server gets beyond the common flags.
        url: of a running OpenAI-compatible server, without ``/v1``.
        model: model name in the requests; SGLang takes any.
    """

    name: str
    flags: tuple[str, ...] = ()
    url: str = ""
    model: str = "default"

    @property
    def file_name(self) -> str:
        """The name as a part of a file name."""
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in self.name)


@dataclass(frozen=True)
class Load:
    """How requests arrive: ``concurrency`` at a time (closed loop), or ``rate`` a second (open loop, Poisson)."""

    concurrency: int = 0
    rate: float = 0.0

    @property
    def label(self) -> str:
        return f"c{self.concurrency}" if self.concurrency else f"r{self.rate:g}"


@dataclass(frozen=True)
class Settings:
    """A whole run. The names are those of the flags and of the TOML keys.

    Attributes:
        arms: the first one is the reference unless ``reference`` names another.
        common: server flags of every arm that is started here.
        threads: ``SGLANG_DDTREE_CPU_THREADS`` of the servers that are started here; 0 leaves it alone.
        concurrency, rates: the loads; both lists may be given.
        sets: prompt sets that ship in PyPI packages.
        files: prompt files (see :mod:`sglang_ddtree.bench.ab.files`).
        split, prompts: which part of the sets, and how many prompts of each set and file; 0 takes all.
        tokens: answer length at most; exactly that with ``fixed_length``.
        body: request fields that every arm gets (temperature, top_p, chat_template_kwargs, ...).
        repeats: how often everything is measured.
        together: keep all servers up and change arms after every cell; else one server after the other.
        run_code: grade answers that are code by running them.
        force: print speedups of arms that differ in more than the algorithm.
        seed: of the arrivals and of the bootstrap.
    """

    arms: tuple[Arm, ...] = ()
    reference: str = ""
    common: tuple[str, ...] = ()
    threads: int = 0
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rates: tuple[float, ...] = ()
    sets: tuple[str, ...] = tuple(SETS)
    files: tuple[str, ...] = ()
    split: str = "heldout"
    prompts: int = 32
    tokens: int = 256
    fixed_length: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 3
    together: bool = False
    run_code: bool = False
    force: bool = False
    seed: int = 1

    @property
    def loads(self) -> tuple[Load, ...]:
        return (*(Load(concurrency=n) for n in self.concurrency), *(Load(rate=r) for r in self.rates))

    @property
    def reference_arm(self) -> str:
        return self.reference or self.arms[0].name

    @property
    def greedy(self) -> bool:
        return not self.body.get("temperature", 0)

    @property
    def request_body(self) -> dict[str, Any]:
        """What a request says beside messages and length."""
        return {**self.body, **({"ignore_eos": True} if self.fixed_length else {})}


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("threads", "prompts", "tokens", "repeats", "seed"), (int,)),
    **dict.fromkeys(("fixed_length", "together", "run_code", "force"), (bool,)),
    **dict.fromkeys(("reference", "split"), (str,)),
    "body": (dict,),
}
_LISTS: dict[str, tuple[type, ...]] = {"concurrency": (int,), "rates": (int, float), "sets": (str,), "files": (str,)}


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file; file names in it are relative to it.

    Raises:
        ConfigError: it cannot be read, or says something unknown.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    known = {each.name for each in fields(Settings)} - {"arms"} | {"arm"}
    if unknown := sorted(set(data) - known):
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; there are {', '.join(sorted(known))}")
    for key, kinds in _KINDS.items():
        if key in data and not _is(data[key], kinds):
            raise ConfigError(f"{path}: {key} must be of type {kinds[0].__name__}")
    for key, kinds in _LISTS.items():
        if key in data and not (isinstance(data[key], list) and all(_is(item, kinds) for item in data[key])):
            raise ConfigError(f"{path}: {key} must be a list of {kinds[-1].__name__}")
        if key in data:
            data[key] = tuple(data[key])
    if "common" in data:
        data["common"] = read_flags(data["common"], f"{path}: common")
    if "files" in data:
        data["files"] = tuple(str(path.parent / name) for name in data["files"])
    if "arm" in data:
        data["arms"] = _arms(data.pop("arm"), path)
    return data


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    # A bool is an int to Python, not to the reader of a file.
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _arms(tables: Any, path: Path) -> tuple[Arm, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: arms are given as [[arm]] tables")
    found = []
    for table in tables:
        if unknown := sorted(set(table) - {"name", "flags", "url", "model"}):
            raise ConfigError(f"{path}: unknown key {unknown[0]!r} in [[arm]]; there are name, flags, url, model")
        if not all(isinstance(table.get(key, ""), str) for key in ("name", "url", "model")) or not table.get("name"):
            raise ConfigError(f"{path}: an [[arm]] needs a name; name, url and model are strings")
        table = dict(table)
        table["flags"] = read_flags(table.get("flags", []), f"{path}: flags of {table['name']}")
        found.append(Arm(**table))
    return tuple(found)


def read_flags(value: Any, where: str) -> tuple[str, ...]:
    """Server flags given as one string or as a list of strings."""
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ConfigError(f"{where}: server flags are one string or a list of strings")


def parse_arm(text: str) -> Arm:
    """``NAME=URL`` or ``NAME=SERVER FLAGS``; a URL may end in ``#MODEL``.

    Raises:
        ConfigError: there is no name.
    """
    name, equals, rest = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--arm {text!r}: give NAME=URL or NAME=SERVER FLAGS")
    if rest.startswith(("http://", "https://")):
        url, _, model = rest.partition("#")
        return Arm(name.strip(), url=url, model=model or "default")
    return Arm(name.strip(), flags=read_flags(rest, f"--arm {name}"))


def default_arms(drafter: Path, budgets: Sequence[int]) -> tuple[Arm, ...]:
    """Plain decoding, DFLASH, and DDTREE at each budget."""
    return tuple(Arm(arm.label, flags=tuple(arm.flags(drafter))) for arm in make_arms(budgets))


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # not a number: ValueError
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not any(c.isspace() for c in url)


def checked(settings: Settings) -> Settings:
    """The settings, with URLs in one form.

    Raises:
        ConfigError: they do not describe a run.
    """
    names = [arm.name for arm in settings.arms]
    if not names:
        raise ConfigError("no arms: give --arm, [[arm]] tables in the file, or a drafter")
    if len({arm.file_name for arm in settings.arms}) < len(names):
        raise ConfigError(f"two arms have the same name: {', '.join(names)}")
    for arm in settings.arms:
        if arm.url and arm.flags:
            raise ConfigError(f"{arm.name}: give url or flags, not both")
        if arm.url and not _is_http(arm.url):
            raise ConfigError(f"{arm.name}: {arm.url!r} is no http address")
    if settings.reference_arm not in names:
        raise ConfigError(f"reference {settings.reference!r} is none of the arms: {', '.join(names)}")
    if not settings.loads or any(load.concurrency < 1 and not 0 < load.rate < math.inf for load in settings.loads):
        raise ConfigError("concurrency and rates must be positive, and one of them given")
    if settings.repeats < 1 or settings.tokens < 2 or settings.prompts < 0 or settings.threads < 0:
        raise ConfigError("repeats must be at least 1, tokens at least 2, prompts and threads not negative")
    if unknown := [name for name in settings.sets if name not in SETS]:
        raise ConfigError(f"unknown prompt set {unknown[0]!r}; there are {', '.join(SETS)}")
    if settings.split not in SPLITS:
        raise ConfigError(f"unknown split {settings.split!r}; there are {', '.join(SPLITS)}")
    if not settings.sets and not settings.files:
        raise ConfigError("no prompts: give sets or files")
    arms = tuple(replace(arm, url=arm.url.rstrip("/").removesuffix("/v1")) for arm in settings.arms)
    return replace(settings, arms=arms)
