"""Requests that make no sense: refused at the call by every door, before anything is stored or sent."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, group, signature
from kombu.common import Broadcast

from celery_outbox.errors import OptionError
from tests.canvas.stall import OpenStall, Stall, memory_config

EVERYWHERE = Broadcast("everywhere")
STORE = {"via_outbox": True}

#: What is said, and a word of the answer.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "off and a database": ({"via_outbox": False, "outbox_database": "main"}, "via_outbox=False alone"),
    "off and a broker": ({"via_outbox": False, "outbox_broker": "other"}, "via_outbox=False alone"),
    "unknown database": ({"outbox_database": "nowhere"}, "'nowhere'"),
    "unknown broker": ({"outbox_broker": "nowhere"}, "'nowhere'"),
    "no boolean": ({"via_outbox": "yes"}, "expected True, False or None"),
    "bad retry policy": ({**STORE, "outbox_retry": {"max": 1}}, "outbox_retry"),
    "connection": ({**STORE, "connection": object()}, "connection"),
    "broadcast by name": ({**STORE, "queue": "everywhere"}, "Broadcast"),
    "broadcast": ({**STORE, "queue": EVERYWHERE}, "Broadcast"),
    "broadcast declared": ({**STORE, "declare": [EVERYWHERE]}, "Broadcast"),
}
#: Celery makes them options of a chord's body, which no serializer takes.
OBJECTS = {"broadcast", "broadcast declared"}

Door = Callable[[Stall, dict[str, Any]], Any]

DOORS: dict[str, Door] = {
    "task": lambda s, o: s.echo.apply_async((1,), **o),
    "delay": lambda s, o: s.echo.s(1).set(**o).delay(),
    "group": lambda s, o: group(s.echo.s(1), s.echo.s(2)).apply_async(**o),
    "member": lambda s, o: group(s.echo.s(1).set(**STORE), s.echo.s(2).set(**o)).delay(),
    "chunks": lambda s, o: s.echo.chunks([(1,), (2,)], 1).apply_async(**o),
    "map": lambda s, o: s.echo.map([1, 2]).apply_async(**o),
    "starmap": lambda s, o: s.echo.starmap([(1,), (2,)]).apply_async(**o),
    "bulk": lambda s, o: s.outbox.bulk([s.echo.s(1), s.echo.s(2).set(**o), s.echo.s(3)]),
}
#: Where eager mode has nothing of its own.
BY_NAME: dict[str, Door] = {
    "send_task": lambda s, o: s.app.send_task("stall.echo", (1,), **o),
    "send_task of an unknown name": lambda s, o: s.app.send_task("other.run", **o),
    "signature of a name": lambda s, o: signature("other.run", app=s.app).apply_async(**o),
}
CHAINED: dict[str, Door] = {
    "chain": lambda s, o: chain(s.echo.s(1), s.echo.s()).apply_async(**o),
    "first of a chain": lambda s, o: chain(s.echo.s(1).set(**o), s.echo.s()).delay(),
    "chord": lambda s, o: chord([s.echo.s(1), s.echo.s(2)], s.total.s()).apply_async(**o),
    "member of a chord": lambda s, o: chord(
        [s.echo.s(1).set(**STORE), s.echo.s(2).set(**o)], s.total.s()
    ).delay(),
}


@pytest.fixture
def stall(two_stall: Stall) -> Stall:
    two_stall.app.amqp.queues.add(EVERYWHERE)
    two_stall.app.conf.result_backend = "cache+memory://"
    return two_stall


def refuse_everything(stall: Stall, door: Door, names: set[str]) -> None:
    """Assert that the door refuses what is named, and that nothing is left of it."""
    ran: list[Any] = []
    stall.echo.run = ran.append
    with stall.transaction("main"):
        for name in sorted(names):
            options, text = REFUSED[name]
            with pytest.raises(OptionError, match=text):
                door(stall, dict(options))
    left = stall.stored("main"), stall.stored("billing"), stall.sent, ran
    assert left == ([], [], [], [])


@pytest.mark.parametrize("name", DOORS | BY_NAME)
def test_a_door_refuses_what_makes_no_sense(name: str, stall: Stall) -> None:
    refuse_everything(stall, (DOORS | BY_NAME)[name], set(REFUSED))


@pytest.mark.parametrize("name", sorted(DOORS.keys() - {"member"}))
def test_a_door_refuses_the_same_in_eager_mode(name: str, stall: Stall) -> None:
    stall.app.conf.task_always_eager = True
    refuse_everything(stall, DOORS[name], set(REFUSED))


def test_a_group_of_a_bad_member_runs_none_in_eager_mode(stall: Stall) -> None:
    stall.app.conf.task_always_eager = True
    refuse_everything(stall, DOORS["member"], set(REFUSED))


@pytest.mark.parametrize("name", CHAINED)
def test_a_chain_and_a_chord_refuse_the_same(name: str, stall: Stall) -> None:
    left_out = OBJECTS | {"connection"} if name == "chord" else set()
    refuse_everything(stall, CHAINED[name], REFUSED.keys() - left_out)


def test_a_connection_for_a_chord_is_refused(stall: Stall) -> None:
    refuse_everything(stall, CHAINED["chord"], {"connection"})


@pytest.mark.parametrize("name", CHAINED)
def test_a_chain_and_a_chord_refuse_a_choice_in_eager_mode(name: str, stall: Stall) -> None:
    stall.app.conf.task_always_eager = True
    broker = {each for each in REFUSED if each.startswith(("broadcast", "connection"))}
    refuse_everything(stall, CHAINED[name], REFUSED.keys() - broker)


@pytest.mark.parametrize("name", CHAINED)
def test_a_chain_and_a_chord_refuse_a_destination_in_eager_mode(name: str, stall: Stall) -> None:
    stall.app.conf.task_always_eager = True
    refused = {"connection", "broadcast by name"}
    # What is given to a chord and no connection belongs to its body, which a worker sends.
    refuse_everything(
        stall, CHAINED[name], refused - ({"broadcast by name"} if name == "chord" else set())
    )


def test_the_options_of_bulk_are_looked_at_for_all(stall: Stall) -> None:
    for name, (options, text) in REFUSED.items():
        if options.keys() <= {"via_outbox", "outbox_database", "outbox_broker"}:
            with pytest.raises(OptionError, match=text):
                stall.outbox.bulk([stall.echo.s(1), stall.echo.s(2)], **options)
            assert (stall.stored("main"), stall.stored("billing"), stall.sent) == ([], [], []), name


def test_a_broadcast_queue_of_a_route_is_refused(stall: Stall) -> None:
    stall.app.conf.task_routes = {"stall.echo": {"queue": EVERYWHERE.name}}
    for is_eager in (False, True):
        stall.app.conf.task_always_eager = is_eager
        with stall.transaction("main"), pytest.raises(OptionError, match="Broadcast"):
            stall.echo.apply_async((1,), **STORE)
    assert (stall.stored("main"), stall.sent) == ([], [])


def test_a_queue_that_no_broker_takes_is_refused(stall: Stall) -> None:
    for options in (
        {"queue": 7},
        {"exchange": 7, "routing_key": "x"},
        {"exchange": "x", "routing_key": 7},
    ):
        with stall.transaction("main"), pytest.raises(OptionError, match="7"):
            stall.echo.apply_async((1,), **STORE, **options)
    assert stall.names == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"eta": "tomorrow"}, OptionError),
        ({"declare": ["reports"]}, OptionError),
        ({"expiration": "600"}, OptionError),
        ({"delivery_mode": "lazy"}, KeyError),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_what_no_worker_or_broker_could_read_is_refused(
    options: dict[str, Any], error: type[Exception], stall: Stall
) -> None:
    with stall.transaction("main"), pytest.raises(error):
        stall.echo.apply_async((1,), **STORE, **options)
    assert stall.stored("main") == []


def test_a_time_that_no_worker_could_read_is_refused_in_eager_mode(stall: Stall) -> None:
    stall.app.conf.task_always_eager = True
    with stall.transaction("main"), pytest.raises(OptionError, match="'tomorrow'"):
        stall.echo.apply_async((1,), **STORE, eta="tomorrow")


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_queue_that_may_not_be_made_is_refused_as_by_celery(
    is_eager: bool, open_stall: OpenStall
) -> None:
    config = memory_config()
    known = config["task_default_queue"]
    config |= {"task_queues": {known: {}}, "task_create_missing_queues": False}
    stall = open_stall(config=config | {"task_always_eager": is_eager})
    with stall.transaction():
        with pytest.raises(Exception, match="typo") as refused:
            stall.echo.apply_async((1,), queue="typo", **STORE)
        stall.echo.apply_async((2,), queue=known, **STORE)
    stall.app.conf.task_always_eager = False
    with pytest.raises(type(refused.value), match="typo"):
        stall.echo.apply_async((1,), queue="typo")
    assert [each.args for each in stall.stored()] == ([] if is_eager else [[2]])


def test_a_producer_is_not_used(mixed_stall: Stall) -> None:
    stall = mixed_stall
    with stall.app.connection_for_write() as connection, stall.transaction():
        stall.echo.apply_async((1,), producer=stall.app.amqp.Producer(connection), **STORE)
    assert (stall.names, stall.sent) == (["echo"], [])
