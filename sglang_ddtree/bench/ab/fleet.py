"""The servers of a run: started when their turn comes, warmed up once, and stopped at the end whatever happens."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from sglang_ddtree.bench import server
from sglang_ddtree.bench.ab.config import Arm, Load, Settings
from sglang_ddtree.bench.ab.endpoint import Endpoint, look_up
from sglang_ddtree.bench.ab.load import send
from sglang_ddtree.bench.compare import WARM_UP_TOKENS, Say
from sglang_ddtree.bench.prompts import Prompt


class Fleet:
    """Use as a context manager; :meth:`get` gives a running, warm arm."""

    def __init__(self, settings: Settings, warm_up: list[Prompt], log_dir: Path, say: Say) -> None:
        self.settings, self.warm_up, self.log_dir, self.say = settings, warm_up, log_dir, say
        self.up: dict[str, Endpoint] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.up):
            self._stop(name)

    def get(self, arm: Arm) -> Endpoint:
        """The arm's server; without ``together`` the others that were started here stop first.

        Raises:
            ServerError: it does not start, does not answer, or has stopped by itself.
        """
        if arm.name in self.up:
            return self.up[arm.name]
        if not self.settings.together and not arm.url:
            for name in [name for name, other in self.up.items() if other.server is not None]:
                self._stop(name)
        one = None if arm.url else self._start(arm)
        # Noted before anything else may fail, so that it is stopped.
        self.up[arm.name] = Endpoint(arm, arm.url, None) if one is None else Endpoint(arm, one.url, None, one)
        self.up[arm.name] = look_up(arm, self.up[arm.name].url, one)
        self._warm(self.up[arm.name])
        return self.up[arm.name]

    def check(self, arm: Arm) -> None:
        """Raise ServerError when the arm's server has stopped by itself."""
        one = self.up[arm.name].server
        if one is not None and not one.alive():
            raise server.ServerError(f"{arm.name}: the server stopped:\n{server.tail(one.log)}")

    def _start(self, arm: Arm) -> server.Server:
        self.say(f"{arm.name}: starting the server")
        threads = self.settings.threads
        started = server.start(
            # Every arm: what a step does is told by /metrics only.
            [*self.settings.common, *arm.flags, "--enable-metrics"],
            log=self.log_dir / f"{arm.file_name}.log",
            env={"SGLANG_DDTREE_CPU_THREADS": str(threads)} if threads else {},
            progress=lambda stage: self.say(f"{arm.name}: {stage}"),
        )
        self.say(f"{arm.name}: answers on {started.url} after {started.start_seconds:.0f} s")
        return started

    def _warm(self, endpoint: Endpoint) -> None:
        """A few short answers, one at a time and together, that are not measured."""
        most = max(self.settings.concurrency, default=1)
        for count in sorted({1, min(most, len(self.warm_up))}):
            requests, _ = send(
                endpoint,
                self.warm_up[:count],
                Load(concurrency=count),
                WARM_UP_TOKENS,
                self.settings.request_body,
                self.settings.seed,
            )
            failed = [request.error for request in requests if request.error]
            if failed:
                raise server.ServerError(f"{endpoint.arm.name}: the warm-up failed at {endpoint.url}: {failed[0]}")

    def _stop(self, name: str) -> None:
        one = self.up.pop(name).server
        if one is not None:
            self.say(f"{name}: stopping the server")
            one.stop()
