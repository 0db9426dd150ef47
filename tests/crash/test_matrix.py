"""One column of the matrix, and a few of the cuts: PostgreSQL and Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.boundaries import BOUNDARIES, STORED, Boundary, crash
from tests.crash.cuts import cut, cut_at_each, cuts_of
from tests.crash.kills import kill_at_random
from tests.crash.places import Place, Stage
from tests.servers import DatabaseServer, RedisServer

#: Of each message nobody but the relay's next try can tell whether the broker has it.
CERTAIN = {("publish", "after"), ("settle", "before"), ("settle", "during")}


@pytest.fixture
def place(postgresql: DatabaseServer, redis_server: RedisServer, tmp_path: Path) -> Iterator[Place]:
    stage = Stage(
        directory=tmp_path,
        databases={"postgresql": postgresql.create_database},
        brokers={"redis": redis_server.empty_database},
    )
    with stage.place("redis", "postgresql") as made:
        yield made


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda each: each.name.replace(" ", "-"))
def test_a_relay_killed_at_a_boundary_loses_nothing_and_doubles_no_more_than_it_must(
    boundary: Boundary, place: Place
) -> None:
    count = crash(place, boundary)
    assert count.is_right, count
    if (boundary.phase, boundary.moment) in CERTAIN:
        # Fewer would mean that it died elsewhere.
        assert count.duplicates == STORED


def test_a_relay_cut_off_at_each_request_that_carries_a_batch_goes_on(place: Place) -> None:
    # Before, it connects and declares.
    total = cut_at_each(place, "broker", "requests", first=15)
    assert total.is_right, total
    assert cuts_of(total) >= 3


@pytest.mark.parametrize(
    ("wire", "what", "number"),
    [("broker", "replies", 17), ("database", "requests", 30), ("database", "replies", 30)],
)
def test_a_relay_whose_connections_are_cut_goes_on(
    wire: str, what: str, number: int, place: Place
) -> None:
    count, has_cut = cut(place, wire, what, number)
    assert has_cut
    assert count.is_right, count


def test_relays_killed_at_random_moments_lose_nothing(place: Place) -> None:
    count = kill_at_random(place, kills=3, seed=1)
    assert count.is_right, count
    assert count.stored
