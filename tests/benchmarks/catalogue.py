"""Which benchmarks there are."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks import growing, latency, monitoring, pinned, publishing, relaying, storing
from tests.benchmarks.measuring import Report, Scale
from tests.benchmarks.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One that can be asked for, and the servers that it needs besides Redis."""

    run: Callable[[Stage, Scale], Report]
    needs: tuple[str, ...] = ()


BENCHMARKS = {
    "store": Benchmark(run=storing.store, needs=("postgresql",)),
    "group": Benchmark(run=storing.store_group, needs=("postgresql",)),
    "postgresql": Benchmark(run=growing.grow_postgresql, needs=("postgresql",)),
    "mariadb": Benchmark(run=growing.grow_mariadb, needs=("mariadb",)),
    "sqlite": Benchmark(run=growing.grow_sqlite),
    "redis": Benchmark(run=publishing.publish_redis),
    "rabbitmq": Benchmark(run=publishing.publish_rabbitmq, needs=("rabbitmq",)),
    "sqs": Benchmark(run=publishing.publish_sqs, needs=("sqs",)),
    "database": Benchmark(run=publishing.publish_database, needs=("postgresql", "mariadb")),
    "latency": Benchmark(run=latency.measure_latency, needs=("postgresql",)),
    "relay": Benchmark(run=relaying.relay, needs=("postgresql",)),
    "pinned": Benchmark(run=pinned.pin_postgresql, needs=("postgresql",)),
    "monitor": Benchmark(run=monitoring.monitor_postgresql, needs=("postgresql",)),
}
