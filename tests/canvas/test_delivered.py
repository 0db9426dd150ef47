"""Stored canvases in a real worker: they come to what they come to when they are sent plainly."""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import amqp
import pytest
import sqlalchemy as sa
from celery import Signature, chain, chord, group
from celery.result import GroupResult
from sqlalchemy.exc import IntegrityError

from tests.canvas.stall import SoldOutError
from tests.canvas.yard import Yard, open_yard
from tests.servers import DatabaseServer, RabbitServer, RedisServer
from tests.waiting import wait_until

# Celery's result backends use what SQLAlchemy 2.1 and redis-py 8 call deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]


@pytest.fixture(scope="module", params=["redis", "database"])
def yard(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    postgresql: DatabaseServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Yard]:
    """A worker whose results are kept by Redis, then one whose results a database keeps."""
    database = postgresql.create_database()
    results = {"redis": redis_server.empty_database(), "database": f"db+{database}"}
    with open_yard(
        redis_server.empty_database(),
        results[request.param],
        database,
        tmp_path_factory.mktemp(request.param),
    ) as it:
        yield it
        gc.collect()  # results unsubscribe now, while the connection is there


#: Of Celery's result backends only Redis lets a task add others to its chord.
grows_chords = pytest.mark.parametrize("yard", ["redis"], indirect=True)

CANVASES: dict[str, tuple[Callable[[Yard], Any], Any]] = {
    "group": (lambda y: group(y.add.s(number, number) for number in range(3)), [0, 2, 4]),
    "chain": (lambda y: chain(y.add.s(1, 1), y.add.s(2), y.add.s(3)), 7),
    "group of chains": (
        lambda y: group(chain(y.add.s(number, 1), y.add.s(10)) for number in range(2)),
        [11, 12],
    ),
    "chain of groups": (
        lambda y: chain(
            y.add.s(1, 1), group(y.add.s(1), y.add.s(2)), y.total.s(), group(y.add.s(1), y.add.s(2))
        ),
        [8, 9],
    ),
    "chord": (lambda y: chord([y.add.s(1, 1), y.add.s(2, 2)], y.total.s()), 6),
    "chord in a chord": (
        lambda y: chord(
            [chord([y.add.s(1, 1), y.add.s(2, 2)], y.total.s()), y.add.s(3, 3)], y.total.s()
        ),
        12,
    ),
    "group in a group": (
        lambda y: group([group(y.add.s(1, 1), y.add.s(2, 2)), y.add.s(3, 3)]),
        [2, 4, 6],
    ),
    "empty header": (lambda y: chord([], y.total.s()), 0),
    "header of one": (lambda y: group([y.add.s(1, 1)]) | y.total.s(), 2),
    "chunks": (lambda y: y.add.chunks([(1, 1), (2, 2), (3, 3)], 2), [[2, 4], [6]]),
    "starmap": (lambda y: y.add.starmap([(1, 1), (2, 2)]), [2, 4]),
}


def test_canvases_come_to_what_they_should(yard: Yard) -> None:
    results = {}
    with yard.transaction():
        for name, (make, _) in CANVASES.items():
            results[name] = make(yard).apply_async(via_outbox=True)
    # A task that is stored by a worker has a relay of its own; here all are sent directly.
    yard.relay()
    values = {name: result.get(timeout=30, interval=0.05) for name, result in results.items()}
    assert values == {name: expected for name, (_, expected) in CANVASES.items()}
    assert yard.waiting == []


def test_the_body_of_a_chord_runs_once_after_the_commit_and_never_after_a_rollback(yard: Yard) -> None:
    def dispatch(what: str) -> Any:
        body = chain(yard.total.s(), yard.record(what))
        return chord([yard.add.s(1, 1), yard.add.s(2, 2)], body).apply_async(via_outbox=True)

    with pytest.raises(SoldOutError), yard.transaction():
        dispatch("chord rolled back")
        raise SoldOutError
    with yard.transaction() as session:
        with pytest.raises(SoldOutError), session.begin_nested():
            dispatch("savepoint rolled back")
            raise SoldOutError
        with session.begin_nested():
            result = dispatch("chord committed")
        yard.relay()
        assert yard.runs("chord committed") == 0
    yard.relay()
    assert result.get(timeout=30, interval=0.05) == 6
    yard.relay()
    # Whatever else the worker has to do, it has done before this one.
    assert yard.add.apply_async((1, 1)).get(timeout=30, interval=0.05) == 2
    seen = [
        yard.runs(f"{what}")
        for what in ("chord committed", "chord rolled back", "savepoint rolled back")
    ]
    assert (seen, yard.waiting) == ([1, 0, 0], [])


def test_a_chord_that_was_not_committed_trips_no_later_one_of_the_same_ids(yard: Yard) -> None:
    def dispatch() -> Any:
        header = group([yard.add.s(1, 1), yard.add.s(2, 2)], task_id="header")
        return chord(header, yard.record("later chord")).apply_async(task_id="body", via_outbox=True)

    with pytest.raises(SoldOutError), yard.transaction():
        dispatch()
        raise SoldOutError
    # Refused by the COMMIT itself, when the result backend has been told of the chord.
    with pytest.raises(IntegrityError), yard.transaction() as session:
        session.execute(sa.text("CREATE TABLE doomed (id INT UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
        session.execute(sa.text("INSERT INTO doomed VALUES (1), (1)"))
        dispatch()
    yard.relay()
    assert yard.waiting == []
    with yard.transaction():
        result = dispatch()
    yard.relay()
    assert sorted(result.get(timeout=30, interval=0.05)) == [2, 4]
    yard.relay()
    assert yard.add.apply_async((1, 1)).get(timeout=30, interval=0.05) == 2
    assert (yard.runs("later chord"), yard.waiting) == (1, [])


def test_a_body_that_says_to_store_is_stored_by_the_worker(yard: Yard) -> None:
    body = yard.record("stored body").set(via_outbox=True)
    with yard.transaction():
        result = chord([yard.add.s(1, 1)], body).apply_async(via_outbox=True)
    yard.relay()
    wait_until(lambda: yard.waiting == ["project.record"], 30, "the body in the table")
    assert yard.runs("stored body") == 0
    yard.relay()
    assert (result.get(timeout=30, interval=0.05), yard.runs("stored body")) == ([2], 1)


def test_a_later_step_that_says_to_store_is_stored_by_the_worker(yard: Yard) -> None:
    with yard.transaction():
        result = chain(yard.add.s(1, 1), yard.add.s(2).set(via_outbox=True), yard.add.s(3)).apply_async(
            via_outbox=True
        )
    yard.relay()
    wait_until(lambda: yard.waiting == ["stall.add"], 30, "the second step in the table")
    yard.relay()
    assert (result.get(timeout=30, interval=0.05), yard.waiting) == (7, [])


def test_links_run(yard: Yard) -> None:
    linked, after_failure = yard.record("linked"), yard.record("failed")
    after_failure = Signature("project.record", (0, "failed"), immutable=True, app=yard.app)
    with yard.transaction():
        yard.add.apply_async((1, 1), link=linked, via_outbox=True)
        yard.total.apply_async(("x",), link_error=after_failure, via_outbox=True)
    yard.relay()
    wait_until(lambda: (yard.runs("linked"), yard.runs("failed")) == (1, 1), 30, "both links")


def test_groups_are_joined_iterated_saved_and_restored(yard: Yard) -> None:
    members = [yard.add.s(number, 1) for number in range(5)]
    with yard.transaction():
        result = group(members).apply_async(via_outbox=True)
        result.save()
    restored: GroupResult = yard.app.GroupResult.restore(result.id)
    ready: list[Any] = []
    result.then(ready.append)
    yard.relay()
    assert result.join(timeout=30) == [1, 2, 3, 4, 5]
    assert restored.get(timeout=30, interval=0.05) == [1, 2, 3, 4, 5]
    assert sorted(each.get(timeout=30, interval=0.05) for each in restored) == [1, 2, 3, 4, 5]
    if yard.app.backend.supports_native_join:
        again = yard.app.GroupResult.restore(result.id)
        assert sorted(meta["result"] for _, meta in again.iter_native(timeout=30)) == [1, 2, 3, 4, 5]
        wait_until(lambda: ready == [result], 10, "the callback of the group")


@pytest.mark.parametrize("choice", [None, True])
def test_a_retry_outlives_the_transaction_that_it_rolls_back(choice: bool | None, yard: Yard) -> None:
    signature = yard.task("project.again").s(choice)
    signature.stamp(monitoring_id="m1")
    with yard.transaction():
        result = signature.apply_async(headers={"tenant": "a"}, via_outbox=True)
    yard.relay()
    if choice:
        wait_until(lambda: yard.waiting == ["project.again"], 30, "the retry in the table")
        yard.relay()
    said = result.get(timeout=30, interval=0.05)
    assert (said["id"], said["retries"], said["headers"]) == (result.id, 1, {"tenant": "a"})
    assert said["stamps"] == {"monitoring_id": "m1"}
    assert (yard.runs("rolled back"), yard.waiting) == (0, [])


@pytest.mark.parametrize("choice", [None, True])
def test_a_replacement_outlives_the_transaction_that_it_rolls_back(
    choice: bool | None, yard: Yard
) -> None:
    with yard.transaction():
        result = yard.task("project.instead").apply_async((choice,), via_outbox=True)
    value = []

    def is_there() -> bool:
        if result.ready():
            value.append(result.get(timeout=1))
        return bool(value)

    yard.deliver_until(is_there, "the value of the replacement")
    assert (value[0], yard.runs("rolled back"), yard.waiting) == ([0, 2, 4], 0, [])


def test_a_task_stored_by_a_task_knows_its_parent_and_root(yard: Yard) -> None:
    with yard.transaction():
        result = chain(yard.task("project.family").s(), yard.task("project.about").si()).apply_async(
            via_outbox=True
        )
    yard.relay()
    parent, child = result.parent.get(timeout=30, interval=0.05)
    after = result.get(timeout=30, interval=0.05)
    yard.relay()
    said = yard.app.AsyncResult(child).get(timeout=30, interval=0.05)
    assert (said["id"], said["parent_id"], said["root_id"]) == (child, parent, parent)
    assert (after["parent_id"], after["root_id"]) == (parent, parent)


@grows_chords
def test_a_task_added_to_a_stored_chord_is_stored_and_waited_for(yard: Yard) -> None:
    grow = yard.task("project.grow")
    with yard.transaction():
        results = [
            chord([grow.s(end), yard.add.s(2, 2)], yard.total.s()).apply_async(via_outbox=True)
            for end in ("commit", "rollback")
        ]
    yard.relay()
    assert results[1].get(timeout=30, interval=0.05) == 5
    wait_until(lambda: yard.waiting == ["stall.add"], 30, "the task that was added")
    yard.relay()
    assert results[0].get(timeout=30, interval=0.05) == 15


@grows_chords
def test_a_task_added_to_a_direct_chord_is_sent_directly(yard: Yard) -> None:
    result = chord([yard.task("project.grow").s("commit")], yard.total.s()).apply_async()
    assert (result.get(timeout=30, interval=0.05), yard.waiting) == (11, [])


@pytest.fixture(scope="module")
def rpc_yard(rabbitmq: RabbitServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """A worker that sends results back over RabbitMQ."""
    directory = tmp_path_factory.mktemp("rpc")
    database = f"sqlite:///{directory / 'outbox.db'}"
    with open_yard(rabbitmq.empty_vhost(), "rpc://", database, directory) as it:
        yield it
        it.app.backend.result_consumer.stop()


def relay_when_awaited(yard: Yard) -> threading.Thread:
    """Deliver as soon as the queue of answers to this thread is there."""
    queue = yard.app.thread_oid

    def is_there() -> bool:
        with yard.app.connection_for_read() as connection:
            try:
                connection.default_channel.queue_declare(queue, passive=True)
            except amqp.NotFound:
                return False
        return True

    def work() -> None:
        wait_until(is_there, 30, "the queue of answers")
        yard.relay()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_answers_over_rabbitmq_come_to_a_get_that_waits(rpc_yard: Yard) -> None:
    yard = rpc_yard
    with yard.transaction():
        single = yard.add.apply_async((1, 2), via_outbox=True)
        both = group(yard.add.s(1, 1), yard.add.s(2, 2)).apply_async(via_outbox=True)
        chained = chain(yard.add.s(1, 1), yard.add.s(2)).apply_async(via_outbox=True)
    relay = relay_when_awaited(yard)
    assert single.get(timeout=30, interval=0.05) == 3
    relay.join()
    assert both.get(timeout=30, interval=0.05) == [2, 4]
    assert chained.get(timeout=30, interval=0.05) == 4
