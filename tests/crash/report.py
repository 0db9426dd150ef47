"""What is printed, and what is written into the documentation: the same tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from tests.crash.boundaries import BOUNDARIES, STORED
from tests.crash.cuts import cuts_of
from tests.crash.places import Count

#: A kind of broker and a kind of database.
Pair = tuple[str, str]

NAMES = {
    "redis": "Redis",
    "rabbitmq": "RabbitMQ",
    "sqs": "SQS",
    "fifo": "SQS FIFO",
    "database": "database transport",
    "postgresql": "PostgreSQL",
    "mariadb": "MariaDB",
    "sqlite": "SQLite",
}
PHASES = {"claim": "claim", "publish": "publish", "settle": "settle", "next": "settle and claim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What came of everything that was asked for.

    Attributes:
        cells: by the boundary's name, for each pair.
        kills: of random kills.
        cuts: by the pair, the wire and what was cut.
    """

    cells: dict[Pair, dict[str, Count]] = field(default_factory=dict)
    kills: dict[Pair, Count] = field(default_factory=dict)
    cuts: dict[tuple[str, str, str, str], Count] = field(default_factory=dict)

    def wrong(self) -> Sequence[str]:
        """What has not kept its promise."""
        found = {
            f"{pair} {name}": count for pair, row in self.cells.items() for name, count in row.items()
        }
        found |= {f"{pair} kills": count for pair, count in self.kills.items()}
        found |= {f"{wire} cuts": count for wire, count in self.cuts.items()}
        return [f"{name}: {count}" for name, count in found.items() if not count.is_right]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self, console: Console) -> None:
        """Print it."""
        table = Table(title=self.title, title_justify="left")
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if number < 2 else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        """Write it."""
        rule = ["---" if number < 2 else "---:" for number in range(len(self.headings))]
        lines = [self.headings, rule, *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"### {self.title}\n\n{table}\n"


def sheets(results: Results, kills: int) -> Sequence[Sheet]:
    """The tables of what there is."""
    made = [_matrix(results.cells), _kills(results.kills, kills), _cuts(results.cuts)]
    return [sheet for sheet in made if sheet.rows]


def _matrix(cells: Mapping[Pair, Mapping[str, Count]]) -> Sheet:
    rows = [[*_names(pair), _lost(row.values()), *_by_phase(row)] for pair, row in cells.items()]
    if rows:
        allowed = {each.name: Count(duplicates=each.allowed) for each in BOUNDARIES}
        rows.insert(0, ["*at most*", "", "0", *_by_phase(allowed)])
    return Sheet(
        title=f"Killed before · during · after each step: duplicates among {STORED} messages",
        headings=["broker", "database", "lost", *PHASES.values()],
        rows=rows,
    )


def _by_phase(row: Mapping[str, Count]) -> list[str]:
    by_phase = {
        phase: [_cell(row[each.name]) for each in BOUNDARIES if each.phase == phase] for phase in PHASES
    }
    return [" · ".join(values) for values in by_phase.values()]


def _kills(counts: Mapping[Pair, Count], kills: int) -> Sheet:
    return Sheet(
        title=f"{kills} kills at random moments",
        headings=["broker", "database", "messages", "lost", "duplicates", "at most"],
        rows=[
            [*_names(pair), f"{each.stored:,}", _lost([each]), _cell(each), f"{each.allowed:,}"]
            for pair, each in counts.items()
        ],
    )


def _cuts(found: Mapping[tuple[str, str, str, str], Count]) -> Sheet:
    return Sheet(
        title="Cut at each request and each reply",
        headings=[
            "the wire to",
            "what is cut",
            "the other end",
            "cuts",
            "messages",
            "lost",
            "duplicates",
            "at most",
        ],
        rows=[
            [
                NAMES[broker if wire == "broker" else database],
                what,
                NAMES[database if wire == "broker" else broker],
                str(cuts_of(each)),
                f"{each.stored:,}",
                _lost([each]),
                _cell(each),
                str(each.allowed),
            ]
            for (broker, database, wire, what), each in found.items()
        ],
    )


def _names(pair: Pair) -> Sequence[str]:
    return [NAMES[each] for each in pair]


def _lost(counts: Iterable[Count]) -> str:
    return str(sum(each.lost + each.left + each.strange for each in counts))


def _cell(count: Count) -> str:
    return "?" if count.trouble else str(count.duplicates)
