"""A relay process that shows its numbers, and whoever asks it for them."""

import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.processes import HOST, unused_port
from tests.relay.commands import PROJECT, Running, outbox_command, running
from tests.waiting import wait_until

#: In the order in which the tests name their values.
LABELS = ("database", "broker", "state", "le")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A relay process, and what it answers on its port."""

    process: Running
    port: int

    def ask(self, path: str, timeout: float = 10) -> tuple[int, str]:
        """The status and the text of an answer."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self, path: str) -> int:
        return self.ask(path)[0]

    def wait_for(self, path: str, status: int, timeout: float = 15) -> str:
        """Wait for an answer of that status, and return its text."""
        wait_until(lambda: self.status(path) == status, timeout, f"{status} of {path}", interval=0.1)
        return self.ask(path)[1]

    def numbers(self) -> Mapping[str, float]:
        """What Prometheus would read, by ``name{values of the labels}``."""
        status, text = self.ask("/metrics")
        assert status == 200
        return {
            _key(sample.name, sample.labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def number(self, name: str) -> float | None:
        return self.numbers().get(name)


@contextmanager
def showing(directory: Path, env: dict[str, str], *options: str, app: str = PROJECT) -> Iterator[Shown]:
    """Run a relay that answers on a port of its own, until the end of the block."""
    port = unused_port()
    arguments = ["relay", "--metrics-port", f"{port}", "--metrics-host", HOST, *options]
    with running(outbox_command(*arguments, app=app), directory, env) as process:
        shown = Shown(process=process, port=port)

        def is_there() -> bool:
            assert process.popen.poll() is None, process.output
            with suppress(urllib.error.URLError):
                return shown.status("/healthz") > 0
            return False

        wait_until(is_there, 30, "the port of the relay")
        yield shown


def _key(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{','.join(labels[each] for each in LABELS if each in labels)}}}"


def named(page: str) -> set[str]:
    """The metrics that a text speaks of, without what Prometheus appends for a histogram."""
    found = set(re.findall(r"\bcelery_outbox_[a-z_]+", page))
    return {re.sub(r"_(bucket|sum|count)$", "", each) for each in found}
