"""outbox.bulk: many dispatches stored together, whatever they are; those sent directly go last."""

from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.signals import before_task_publish
from kombu import Connection
from kombu.exceptions import EncodeError, OperationalError

from celery_outbox.errors import DatabaseError, OptionError
from tests.canvas.stall import (
    OPTIONS,
    OpenStall,
    SoldOutError,
    Stall,
    add_tasks,
    counted_inserts,
    memory_config,
    take_sent,
)
from tests.relay.wire import redis_envelopes


def test_results_come_in_the_order_of_the_members(mixed_stall: Stall) -> None:
    stall = mixed_stall
    with stall.transaction():
        results = stall.outbox.bulk(
            [
                stall.add.s(0, 1),
                stall.add.s(1, 1).set(via_outbox=False),
                group(stall.adds(2)),
                stall.add.s(2, 1),
                chain(stall.echo.s(3), stall.add.s(1)),
            ]
        )
    ids = {each.id: each.name for each in [*stall.stored(), *stall.sent]}
    assert [ids.get(each.id) for each in results] == ["stall.add", "stall.add", None, "stall.add", None]
    assert [ids[each.id] for each in results[2]] == ["stall.add", "stall.add"]
    assert ids[results[4].parent.id] == "stall.echo"


def test_everything_is_stored_in_one_statement(stall: Stall) -> None:
    with counted_inserts(stall.engine) as inserts, stall.transaction():
        stall.outbox.bulk([*stall.adds(50), group(stall.adds(50)), stall.charge.s(1, 2)])
    assert (len(stall.names), len(inserts)) == (101, 1)


def test_bulk_without_a_transaction_is_committed_at_once(stall: Stall) -> None:
    with counted_inserts(stall.engine) as inserts:
        stall.outbox.bulk(stall.adds(50))
    assert (len(stall.names), len(inserts)) == (50, 1)


def test_bulk_is_rolled_back_with_its_transaction(stall: Stall) -> None:
    with pytest.raises(SoldOutError), stall.transaction():
        stall.outbox.bulk(stall.adds(5))
        raise SoldOutError
    assert stall.names == []


def test_an_empty_list_is_nothing(open_stall: OpenStall) -> None:
    stall = open_stall(require_transaction=True)
    assert stall.outbox.bulk([]) == []
    assert stall.outbox.bulk(iter(())) == []
    assert stall.names == []


def test_a_generator_is_taken_as_it_comes(stall: Stall) -> None:
    results = stall.outbox.bulk(stall.add.s(number, 1) for number in range(3))
    assert [each.id for each in stall.stored()] == [each.id for each in results]


BAD: dict[str, tuple[Any, type[Exception]]] = {
    "unserializable": (lambda s: s.add.s(object(), 1), EncodeError),
    "unserializable and direct": (lambda s: s.add.s(object(), 1).set(via_outbox=False), EncodeError),
    "wrong number of arguments": (lambda s: s.add.s(1, 2, 3), TypeError),
    "wrong number and direct": (lambda s: s.add.s(1).set(via_outbox=False), TypeError),
    "no signature": (lambda s: "stall.add", OptionError),
    "a task": (lambda s: s.add, OptionError),
    "a dictionary": (lambda s: dict(s.add.s(1, 2)), OptionError),
    "None": (lambda s: None, OptionError),
    "an unknown database": (lambda s: s.add.s(1, 2).set(outbox_database="nowhere"), OptionError),
    "a contradiction": (
        lambda s: s.add.s(1, 2).set(outbox_database="default", via_outbox=False),
        OptionError,
    ),
    "a bad member of a group": (lambda s: group(s.add.s(1, 1), s.add.s(object(), 1)), EncodeError),
}


@pytest.mark.parametrize("has_transaction", [True, False], ids=["transaction", "none"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_member_fails_before_anything_is_stored_or_sent(
    name: str, has_transaction: bool, mixed_stall: Stall
) -> None:
    stall, (make, error) = mixed_stall, BAD[name]
    members = [*stall.adds(2), stall.echo.s(1).set(via_outbox=False), make(stall), stall.add.s(9, 9)]

    def dispatch() -> None:
        with pytest.raises(error):
            stall.outbox.bulk(members)

    if has_transaction:
        with stall.transaction():
            dispatch()
    else:
        dispatch()
    assert (stall.names, stall.sent) == ([], [])


def test_the_choice_of_bulk_is_for_members_without_one(open_stall: OpenStall) -> None:
    stall = open_stall(config=memory_config())
    members = [
        stall.add.s(0, 1),
        stall.charge.s(1, 1),
        stall.echo.s(2).set(via_outbox=True),
        stall.echo.s(3).set(via_outbox=False),
        group([stall.add.s(4, 1)]).set(via_outbox=False),
    ]
    seen = {}
    for choice in (True, None, False):
        with stall.transaction():
            stall.outbox.bulk(members, via_outbox=choice)
        firsts = [each.args[0] for each in stall.stored()]
        seen[choice] = (firsts, [each.args[0] for each in stall.sent])
        with stall.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM celery_outbox")
    assert seen == {
        True: ([0, 1, 2], [3, 4]),
        None: ([1, 2], [0, 3, 4]),
        False: ([2], [0, 1, 3, 4]),
    }


def test_members_go_to_the_databases_they_name(two_stall: Stall) -> None:
    stall = two_stall
    stall.outbox.bulk(
        [stall.add.s(0, 1), stall.add.s(1, 1).set(outbox_database="main"), group(stall.adds(2))],
        outbox_database="billing",
    )
    assert len(stall.stored("billing")) == 3
    assert [each.args for each in stall.stored("main")] == [[1, 1]]


def test_direct_members_are_sent_after_everything_is_stored(stall: Stall) -> None:
    # Its broker is not there.
    with pytest.raises(OperationalError):
        stall.outbox.bulk([stall.echo.s(1).set(via_outbox=False), *stall.adds(2)])
    assert stall.names == ["add", "add"]


def test_direct_members_are_kept_back_when_storing_fails(mixed_stall: Stall) -> None:
    stall = mixed_stall
    with stall.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE celery_outbox")
    with pytest.raises(Exception, match="celery_outbox"):
        stall.outbox.bulk([stall.echo.s(1).set(via_outbox=False), stall.add.s(1, 1)])
    assert stall.sent == []


def test_a_direct_member_equals_what_plain_celery_sends(mixed_stall: Stall) -> None:
    stall = mixed_stall
    plain = Celery("plain", set_as_current=False)
    plain.conf.update(memory_config())
    add_tasks(plain)
    options = {
        "task_id": "same",
        "priority": 3,
        "headers": {"tenant": {"id": 1}},
        "compression": None,
        "expires": 600,
        "countdown": 5,
        "link": plain.tasks["stall.echo"].s(),
        "reply_to": "answers",
        "shadow": "another",
        "time_limit": 9,
    }
    plain.tasks["stall.add"].s(1, 2).set(**options).apply_async()
    stall.outbox.bulk([stall.add.s(1, 2).set(**options)], via_outbox=False)
    (expected,), (sent,) = take_sent(plain), stall.sent
    for message in (expected, sent):
        for name in ("eta", "expires"):
            message.headers.pop(name)
        for name in ("delivery_tag", "delivery_info", "expiration"):
            message.properties.pop(name, None)
    assert (sent.headers, sent.properties, sent.body) == (
        expected.headers,
        expected.properties,
        expected.body,
    )


def test_a_direct_member_goes_by_the_connection_that_it_names(
    mixed_stall: Stall, redis_url: str
) -> None:
    stall = mixed_stall
    queue = stall.app.conf.task_default_queue
    with Connection(redis_url) as connection, stall.transaction():
        member = stall.echo.s(1).set(via_outbox=False, connection=connection)
        stall.outbox.bulk([member, stall.echo.s(2)])
    sent = [each["headers"]["task"] for each in redis_envelopes(redis_url, queue)]
    assert (sent, stall.sent, stall.names) == (["stall.echo"], [], ["echo"])


def test_what_the_caller_changes_afterwards_changes_nothing(mixed_stall: Stall) -> None:
    stall, numbers = mixed_stall, [1]
    members = [stall.total.s(numbers), stall.total.s(numbers).set(via_outbox=False)]
    before = [repr(each) for each in members], [dict(each.options) for each in members]
    with stall.transaction():
        stall.outbox.bulk(members)
        assert ([repr(each) for each in members], [dict(each.options) for each in members]) == before
        numbers.append(2)
        members.clear()
    assert [each.args for each in [*stall.stored(), *stall.sent]] == [[[1]], [[1]]]


def test_handlers_that_dispatch_meanwhile_are_no_members(mixed_stall: Stall) -> None:
    stall = mixed_stall

    def audit(sender: str, **_: Any) -> None:
        if sender == "stall.add":
            stall.echo.delay("audit")

    before_task_publish.connect(audit)
    try:
        with stall.transaction():
            results = stall.outbox.bulk(stall.adds(2))
    finally:
        before_task_publish.disconnect(audit)
    assert (len(results), stall.names, stall.sent_names) == (2, ["add", "add"], ["echo", "echo"])


def test_canvases_are_members_with_all_that_they_need(open_stall: OpenStall, tmp_path: Any) -> None:
    stall = open_stall(config={"result_backend": f"db+sqlite:///{tmp_path / 'results.db'}"})
    with counted_inserts(stall.engine) as inserts, stall.transaction():
        stall.outbox.bulk(
            [
                chord(stall.adds(2), stall.total.s()),
                chain(group(stall.adds(2)), stall.total.s()),
                stall.add.chunks([(1, 2), (3, 4)], 1),
                stall.echo.map([1, 2]),
                group([]),
            ]
        )
    assert sorted(stall.names) == sorted(
        ["celery.chord_unlock", "add", "add"] * 2 + ["celery.starmap"] * 2 + ["celery.map"]
    )
    assert len(inserts) == 1
    assert not [word for each in stall.stored() for word in OPTIONS if word in each.text]


def test_3000_messages_are_split_at_the_limits_of_the_database(
    database_url: str, open_stall: OpenStall
) -> None:
    stall = open_stall(databases={"default": database_url})
    members = [stall.add.si(number, 1) for number in range(3000)]
    # The slow columns, too: a delay and a deadline take more parameters.
    for member in members[::2]:
        member.set(countdown=60, expires=600)
    with counted_inserts(stall.engine) as inserts, stall.transaction():
        results = stall.outbox.bulk(members)
    assert [each.id for each in stall.stored()] == [each.id for each in results]
    assert len(inserts) <= 7


def test_3000_messages_without_a_transaction_are_stored_all_or_not_at_all(stall: Stall) -> None:
    members = [stall.add.si(number, 1) for number in range(3000)]
    with stall.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER full BEFORE INSERT ON celery_outbox"
            " WHEN (SELECT count(*) FROM celery_outbox) >= 2500"
            " BEGIN SELECT RAISE(ABORT, 'the table is full'); END"
        )
    with pytest.raises(DatabaseError, match="the table is full"):
        stall.outbox.bulk(members)
    assert stall.names == []
