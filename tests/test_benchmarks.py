from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.benchmarks.catalogue import BENCHMARKS
from tests.benchmarks.measuring import TINY
from tests.benchmarks.report import show
from tests.benchmarks.stage import Stage
from tests.benchmarks.stub import stub_in_a_process

# Kombu's database transport, on SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(scope="module")
def sqs_stub() -> Iterator[str]:
    with stub_in_a_process(0.01) as url:
        yield url


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest, sqs_stub: str) -> Stage:
    return Stage(
        directory=tmp_path,
        redis=request.getfixturevalue("redis_server"),
        postgresql=request.getfixturevalue("postgresql"),
        mariadb=request.getfixturevalue("mariadb"),
        rabbitmq=request.getfixturevalue("rabbitmq"),
        sqs=request.getfixturevalue("sqs_server"),
        sqs_stub=sqs_stub,
    )


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_prints_its_ratios(name: str, stage: Stage) -> None:
    console = Console(width=120, record=True)
    report = BENCHMARKS[name].run(stage, TINY)
    show(console, report)
    printed = console.export_text()
    assert "ratio" in printed
    assert all(f" {ratio.name} " in printed for ratio in report.ratios)


def test_a_hundred_tasks_of_one_transaction_reach_postgresql_in_one_insert(stage: Stage) -> None:
    report = BENCHMARKS["store"].run(stage, TINY)
    assert report.notes == ["INSERT statements that PostgreSQL saw for 100 tasks: 1 (target 1)"]
