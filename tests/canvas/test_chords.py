"""Chords: nothing reaches the broker or the result backend before the commit, or after a rollback."""

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import chain, chord, group
from kombu.exceptions import EncodeError
from sqlalchemy.orm import Session

from celery_outbox.errors import OptionError
from tests.canvas.stall import (
    OPTIONS,
    OpenStall,
    SoldOutError,
    Stall,
    counted_inserts,
    memory_config,
)
from tests.processes import unused_port


@pytest.fixture
def redis_stall(open_stall: OpenStall, redis_url: str) -> Stall:
    """A stall whose results are kept by Redis, and whose broker is not there."""
    return open_stall(config={"result_backend": redis_url})


@pytest.fixture
def database_stall(open_stall: OpenStall, tmp_path: Any) -> Stall:
    """A stall whose results are kept by a database, which has to be polled."""
    return open_stall(config={"result_backend": f"db+sqlite:///{tmp_path / 'results.db'}"})


def keys(stall: Stall) -> dict[str, str]:
    """What the result backend holds in Redis of Celery's own."""
    with redis.Redis.from_url(stall.app.conf.result_backend, decode_responses=True) as client:
        return {key: client.get(key) for key in client.scan_iter("*") if not key.endswith(".outbox")}


def simple(stall: Stall, **options: Any) -> Any:
    return chord(stall.adds(3), stall.total.s()).apply_async(via_outbox=True, **options)


def test_redis_hears_of_a_chord_when_its_transaction_commits(redis_stall: Stall) -> None:
    stall = redis_stall
    with stall.transaction():
        result = simple(stall)
        before = keys(stall), stall.names
    sizes = {f"celery-taskset-meta-{result.parent.id}.s": "3"}
    assert before == ({}, [])
    assert (keys(stall), stall.names) == (sizes, ["add"] * 3)


def test_redis_never_hears_of_a_chord_that_is_rolled_back(redis_stall: Stall) -> None:
    with pytest.raises(SoldOutError), redis_stall.transaction():
        simple(redis_stall)
        raise SoldOutError
    assert (keys(redis_stall), redis_stall.names) == ({}, [])


def test_a_rolled_back_savepoint_takes_its_chord_along(redis_stall: Stall) -> None:
    stall = redis_stall
    with stall.transaction() as session:
        with pytest.raises(SoldOutError), session.begin_nested():
            simple(stall)
            raise SoldOutError
        with session.begin_nested():
            kept = simple(stall)
    assert list(keys(stall)) == [f"celery-taskset-meta-{kept.parent.id}.s"]
    assert {each.headers["group"] for each in stall.stored()} == {kept.parent.id}


def test_a_chord_on_a_connection_waits_for_its_commit(redis_stall: Stall) -> None:
    stall = redis_stall
    with stall.engine.connect() as connection:
        connection.begin()
        simple(stall)
        before = keys(stall)
        connection.rollback()
        connection.begin()
        simple(stall)
        connection.commit()
    assert before == {}
    assert (len(keys(stall)), stall.names) == (1, ["add"] * 3)


def test_a_chord_without_a_transaction_is_complete_at_once(redis_stall: Stall) -> None:
    with counted_inserts(redis_stall.engine) as inserts:
        simple(redis_stall)
    assert (len(keys(redis_stall)), redis_stall.names, len(inserts)) == (1, ["add"] * 3, 1)


@pytest.mark.parametrize("has_transaction", [True, False])
def test_a_bad_member_leaves_nothing_in_redis(has_transaction: bool, redis_stall: Stall) -> None:
    stall = redis_stall
    inner = group(stall.add.s(1, 1), chain(stall.add.s(2, 1), group(stall.adds(2))))

    def dispatch() -> None:
        with pytest.raises(EncodeError):
            chord([inner, stall.add.s(object(), 1)], stall.total.s()).apply_async(via_outbox=True)

    if has_transaction:
        with stall.transaction():
            dispatch()
    else:
        dispatch()
    assert (keys(stall), stall.names) == ({}, [])


def test_a_polling_backend_gets_its_helper_stored_with_the_header(database_stall: Stall) -> None:
    stall = database_stall
    with stall.transaction():
        simple(stall)
        before = stall.names
    assert (before, stall.names) == ([], ["celery.chord_unlock", "add", "add", "add"])


def test_the_helper_of_a_polling_backend_is_rolled_back_with_the_header(database_stall: Stall) -> None:
    with pytest.raises(SoldOutError), database_stall.transaction():
        simple(database_stall)
        raise SoldOutError
    assert database_stall.names == []


def test_the_helper_goes_where_its_header_goes(open_stall: OpenStall, tmp_path: Any) -> None:
    stall = open_stall(
        databases={name: f"sqlite:///{tmp_path / name}.db" for name in ("main", "billing")},
        config={"result_backend": f"db+sqlite:///{tmp_path / 'results.db'}"},
        brokers={"other": "memory://"},
    )
    chord(stall.adds(2), stall.total.s()).apply_async(outbox_database="billing", outbox_broker="other")
    chord([stall.charge.s(1, 1)], stall.total.s()).apply_async()
    assert [(each.name, each.broker) for each in stall.stored("billing")] == [
        ("celery.chord_unlock", "other"),
        ("stall.add", "other"),
        ("stall.add", "other"),
    ]
    assert [each.name for each in stall.stored("main")] == ["celery.chord_unlock", "stall.charge"]


@pytest.mark.parametrize("backend", ["rpc://", "disabled://"])
def test_a_backend_without_chords_refuses_them_as_in_plain_celery(
    backend: str, open_stall: OpenStall
) -> None:
    stall = open_stall(config={"result_backend": backend, **memory_config()})
    canvases = chord(stall.adds(2), stall.total.s()), chain(group(stall.adds(2)), stall.total.s())
    with stall.transaction():
        for canvas in canvases:
            with pytest.raises(NotImplementedError) as plain:
                canvas.apply_async()
            with pytest.raises(NotImplementedError, match=re.escape(str(plain.value))):
                canvas.apply_async(via_outbox=True)
    assert (stall.names, stall.sent) == ([], [])


CHORDS: dict[str, tuple[Callable[[Stall], Any], list[str]]] = {
    "list": (lambda s: chord(s.adds(2), s.total.s()), ["add", "add"]),
    "group": (lambda s: chord(group(s.adds(2)), s.total.s()), ["add", "add"]),
    "generator": (lambda s: chord((each for each in s.adds(2)), s.total.s()), ["add", "add"]),
    "pipe": (lambda s: group(s.adds(2)) | s.total.s(), ["add", "add"]),
    "pipe of one": (lambda s: group([s.add.s(1, 1)]) | s.echo.s(), ["add"]),
    "header of one": (lambda s: chord([s.add.s(1, 1)], s.total.s()), ["add"]),
    "empty header": (lambda s: chord([], s.total.s()), ["total"]),
    "chain that begins with a group": (
        lambda s: chain(group(s.adds(2)), s.total.s(), s.echo.s()),
        ["add", "add"],
    ),
    "chain with a group inside": (
        lambda s: chain(s.add.s(1, 1), group(s.add.s(1), s.add.s(2)), s.total.s()),
        ["add"],
    ),
    "group of chains in the header": (
        lambda s: chord([chain(s.add.s(1, 1), s.echo.s()), s.add.s(2, 1)], s.total.s()),
        ["add", "add"],
    ),
    "chord in the header": (
        lambda s: chord([chord(s.adds(2), s.total.s()), s.echo.s(3)], s.total.s()),
        ["add", "add", "echo"],
    ),
    "chord as the body": (
        lambda s: chord(s.adds(2), chord([s.total.s(), s.total.s()], s.total.s())),
        ["add", "add"],
    ),
    "group as the body": (lambda s: chord(s.adds(2), group(s.total.s(), s.echo.s())), ["add", "add"]),
    "chain as the body": (lambda s: chord(s.adds(2), chain(s.total.s(), s.echo.s())), ["add", "add"]),
    "group of chords": (
        lambda s: group(chord(s.adds(2), s.total.s()), chord([s.echo.s(3)], s.total.s())),
        ["add", "add", "echo"],
    ),
    "group in the header": (
        lambda s: chord([group(s.adds(2)), s.echo.s(3)], s.total.s()),
        ["echo", "add", "add"],
    ),
    "map in the header": (lambda s: chord([s.echo.map([1, 2])], s.total.s()), ["celery.map"]),
}


@pytest.mark.parametrize("name", CHORDS)
def test_a_chord_stores_its_header_and_nothing_of_ours_travels(name: str, redis_stall: Stall) -> None:
    stall, (make, expected) = redis_stall, CHORDS[name]
    with stall.transaction():
        make(stall).apply_async(via_outbox=True)
        before = keys(stall)
        make(stall).set(via_outbox=True).delay()
    assert (before, sorted(stall.names)) == ({}, sorted(expected * 2))
    assert not [word for each in stall.stored() for word in OPTIONS if word in each.text]


@pytest.mark.parametrize("name", CHORDS)
def test_a_chord_on_a_polling_backend_stores_what_it_needs(name: str, database_stall: Stall) -> None:
    stall, (make, expected) = database_stall, CHORDS[name]
    with stall.transaction():
        make(stall).apply_async(via_outbox=True)
    assert sorted(each for each in stall.names if each != "celery.chord_unlock") == sorted(expected)
    assert not [word for each in stall.stored() for word in OPTIONS if word in each.text]


@pytest.mark.parametrize("name", CHORDS)
def test_a_rolled_back_chord_leaves_nothing(name: str, redis_stall: Stall) -> None:
    with pytest.raises(SoldOutError), redis_stall.transaction():
        CHORDS[name][0](redis_stall).apply_async(via_outbox=True)
        raise SoldOutError
    assert (keys(redis_stall), redis_stall.names) == ({}, [])


@pytest.mark.parametrize("has_transaction", [True, False])
def test_redis_hears_of_every_chord_of_a_nest(has_transaction: bool, redis_stall: Stall) -> None:
    stall = redis_stall
    innermost = chord(stall.adds(3), stall.total.s())
    canvas = chord([chord([innermost, stall.echo.s(3)], stall.total.s())] * 4, stall.total.s())
    if has_transaction:
        with stall.transaction():
            canvas.apply_async(via_outbox=True)
    else:
        canvas.apply_async(via_outbox=True)
    sizes = [value for key, value in keys(stall).items() if key.endswith(".s")]
    assert sorted(sizes) == ["2"] * 4 + ["3"] * 4 + ["4"]


def test_the_body_follows_its_own_choice(redis_stall: Stall) -> None:
    stall = redis_stall
    with stall.transaction():
        chord([stall.add.s(1, 1)], stall.total.s().set(via_outbox=True)).apply_async(via_outbox=True)
    (member,) = stall.stored()
    assert member.embedded["chord"]["options"]["via_outbox"] is True
    assert member.text.count("via_outbox") == 1


KEPT: dict[str, Callable[[Stall], Any]] = {
    "of a group that is continued": lambda s: group(s.adds(2)).set(via_outbox=True) | s.total.s(),
    "of a group that becomes a header": lambda s: chord(
        group(s.adds(2)).set(via_outbox=True), s.total.s()
    ),
    "of a group at the beginning of a chain": lambda s: chain(
        group(s.adds(2)).set(via_outbox=True), s.total.s()
    ),
    "of a group in a group that is continued": lambda s: (
        group([group(s.adds(2)).set(via_outbox=True)]) | s.total.s()
    ),
    "of a chord that is continued": lambda s: (
        chord(s.adds(2), s.total.s()).set(via_outbox=True) | s.echo.s()
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_choice_is_kept_when_celery_makes_a_chord(name: str, redis_stall: Stall) -> None:
    with redis_stall.transaction():
        KEPT[name](redis_stall).apply_async()
        before = keys(redis_stall)
    assert (before, len(keys(redis_stall)), redis_stall.names) == ({}, 1, ["add", "add"])
    assert not [word for each in redis_stall.stored() for word in OPTIONS if word in each.text]


def test_links_of_a_chord_go_to_its_body(redis_stall: Stall) -> None:
    stall = redis_stall
    with stall.transaction():
        chord([stall.add.s(1, 1)], stall.total.s()).apply_async(
            via_outbox=True, link=stall.echo.s(), link_error=stall.echo.s()
        )
    (member,) = stall.stored()
    body = member.embedded["chord"]
    assert [each["task"] for each in body["options"]["link"]] == ["stall.echo"]
    assert [each["task"] for each in body["options"]["link_error"]] == ["stall.echo"]
    assert "via_outbox" not in member.text


def test_members_of_two_databases_are_refused_before_anything_is_written(
    open_stall: OpenStall, redis_url: str, tmp_path: Any
) -> None:
    stall = open_stall(
        databases={name: f"sqlite:///{tmp_path / name}.db" for name in ("main", "billing")},
        config={"result_backend": redis_url},
    )
    header = [
        stall.add.s(1, 1),
        group(stall.add.s(2, 1), stall.add.s(3, 1).set(outbox_database="billing")),
    ]
    for canvas in (chord(header, stall.total.s()), chain(group(header), stall.total.s())):
        with pytest.raises(OptionError, match="'billing', 'main'"):
            canvas.apply_async(via_outbox=True)
    assert (keys(stall), stall.stored("main"), stall.stored("billing")) == ({}, [], [])


def test_direct_members_of_a_stored_chord_are_sent(open_stall: OpenStall, redis_url: str) -> None:
    stall = open_stall(config={"result_backend": redis_url, **memory_config()})
    header = [stall.add.s(1, 1).set(via_outbox=False), group([stall.add.s(2, 1), stall.add.s(3, 1)])]
    header[1].set(via_outbox=False)
    with stall.transaction():
        chord([*header, stall.add.s(4, 1)], stall.total.s()).apply_async(via_outbox=True)
        before = keys(stall)
    assert [each.args[0] for each in stall.stored()] == [4]
    assert sorted(each.args[0] for each in stall.sent) == [1, 2, 3]
    assert (before, list(keys(stall).values())) == ({}, ["4"])
    gc.collect()  # results of direct tasks unsubscribe now, while the connection is there


def test_a_direct_chord_is_what_it_was(open_stall: OpenStall, redis_url: str) -> None:
    stall = open_stall(config={"result_backend": redis_url, **memory_config()})
    with pytest.raises(SoldOutError), stall.transaction():
        chord(stall.adds(2), stall.total.s()).apply_async()
        chord([stall.charge.s(1, 1)], stall.total.s()).apply_async(via_outbox=False)
        raise SoldOutError
    assert (sorted(keys(stall).values()), stall.sent_names) == (["1", "2"], ["add", "add", "charge"])
    gc.collect()  # results of direct tasks unsubscribe now, while the connection is there


def test_a_map_over_a_task_that_says_so_makes_its_chord_wait(
    open_stall: OpenStall, redis_url: str
) -> None:
    stall = open_stall(config={"result_backend": redis_url})
    with pytest.raises(SoldOutError), stall.transaction():
        chord([stall.charge.starmap([(1, 2)])], stall.total.s()).apply_async()
        raise SoldOutError
    assert (keys(stall), stall.names) == ({}, [])


def test_a_chord_of_1000_takes_a_handful_of_statements(redis_stall: Stall) -> None:
    stall = redis_stall
    with counted_inserts(stall.engine) as inserts, stall.transaction():
        chord(stall.adds(1000), stall.total.s()).apply_async(via_outbox=True)
    assert (len(stall.names), len(inserts) <= 3) == (1000, True)


def test_a_chord_may_be_dispatched_again(redis_stall: Stall) -> None:
    stall = redis_stall
    canvas = chord([stall.add.s(1, 1), group(stall.adds(2))], stall.total.s(priority=3))
    canvas.set(via_outbox=True)
    before = repr(canvas), repr(dict(canvas)), dict(canvas.body.options)
    with stall.transaction():
        bodies = {canvas.apply_async().id for _ in range(2)}
    assert (repr(canvas), repr(dict(canvas)), dict(canvas.body.options)) == before
    assert (len(bodies), len(keys(stall)), len(stall.names)) == (2, 2, 6)


@pytest.fixture
def lonely_stall(open_stall: OpenStall) -> Stall:
    """A stall whose result backend is not there, and is given up at once."""
    return open_stall(
        config={
            "result_backend": f"redis://127.0.0.1:{unused_port()}/0",
            "result_backend_transport_options": {"retry_policy": {"max_retries": 0}},
        }
    )


def test_a_chord_fails_before_a_row_is_stored_when_its_backend_is_away(lonely_stall: Stall) -> None:
    stall = lonely_stall
    with Session(stall.engine) as session:
        session.begin()
        simple(stall)
        with pytest.raises((redis.ConnectionError, RuntimeError)):
            session.commit()
        session.rollback()
        session.begin()
        stall.add.apply_async((1, 1), via_outbox=True)
        session.commit()
    with pytest.raises((redis.ConnectionError, RuntimeError)):
        simple(stall)
    assert stall.names == ["add"]
