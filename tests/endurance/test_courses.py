"""A relay process that delivers for long grows in nothing, also where its wires break again and again.

Shorter courses by default; as long as the promise says where CI=true.
"""

import os
from pathlib import Path

import pytest

from tests.endurance.courses import Finish, Ground, cut, whole

IS_FULL = os.environ.get("CI") == "true"
WHOLE = 200_000 if IS_FULL else 10_000
CUT = 20_000 if IS_FULL else 4000


@pytest.fixture
def ground(postgresql_url: str, redis_url: str, tmp_path: Path) -> Ground:
    return Ground(postgresql_url=postgresql_url, redis_url=redis_url, directory=tmp_path)


def assert_steady(finish: Finish) -> None:
    """Memory is flat within 30 MB; descriptors and threads are as many as after the warm-up."""
    assert len(finish.watch.warm) >= 3
    assert finish.watch.growth < 30, finish.lines()
    for name, most in (("descriptors", 5), ("threads", 0)):
        least, greatest = finish.watch.range_of(name)
        assert greatest - least <= most, finish.lines()


def test_a_relay_moves_many_messages_with_the_same_memory_descriptors_and_threads(
    ground: Ground,
) -> None:
    finish = whole(ground, WHOLE)
    assert (finish.watch.delivered, finish.left) == (WHOLE, 0)
    assert_steady(finish)


@pytest.mark.parametrize("what", ["broker", "database"])
def test_a_wire_that_breaks_every_two_hundred_messages_loses_none_and_leaks_nothing(
    what: str, ground: Ground
) -> None:
    finish = cut(ground, CUT, what)
    assert finish.left == 0
    assert finish.watch.arrived.keys() == {f"task {number}" for number in range(CUT)}
    assert finish.cuts >= CUT / 1000
    assert finish.most_connections <= 5
    assert_steady(finish)
