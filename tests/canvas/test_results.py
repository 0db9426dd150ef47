"""Results of stored dispatches: there at once, and quiet until somebody asks for them."""

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery, chain, chord, group
from celery.result import AsyncResult, GroupResult, result_from_tuple
from sqlalchemy.orm import Session

from tests.canvas.stall import OpenStall, Stall, add_tasks, memory_config, running
from tests.processes import unused_port
from tests.proxy import TcpProxy

UNREACHABLE: dict[str, Callable[[], str]] = {
    "redis": lambda: f"redis://127.0.0.1:{unused_port()}/0",
    "rpc": lambda: "rpc://",
    "database": lambda: f"db+postgresql+psycopg://nobody:x@127.0.0.1:{unused_port()}/none",
    "unwritable file": lambda: "db+sqlite:////nowhere/at/all/results.db",
}

every_backend = pytest.mark.parametrize("backend", UNREACHABLE)


@contextmanager
def quickly() -> Iterator[None]:
    # A machine that is busy with other tests needs more than the usual tenth of a second; a backend
    # that is waited for takes six.
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 4


DISPATCHES: dict[str, Callable[[Stall], Any]] = {
    "task": lambda s: s.add.apply_async((1, 2), via_outbox=True),
    "default": lambda s: s.charge.delay(1, 2),
    "send_task": lambda s: s.app.send_task("other.run", via_outbox=True),
    "group": lambda s: group(s.adds(10)).apply_async(via_outbox=True),
    "chain": lambda s: chain(s.add.s(1, 2), s.echo.s(), s.echo.s()).apply_async(via_outbox=True),
    "group of chains": lambda s: group(
        chain(s.add.s(number, 2), s.echo.s()) for number in range(5)
    ).apply_async(via_outbox=True),
    "bulk": lambda s: s.outbox.bulk([*s.adds(5), group(s.adds(5))]),
    "map": lambda s: s.echo.map([1, 2]).apply_async(via_outbox=True),
}


@every_backend
@pytest.mark.parametrize("name", DISPATCHES)
def test_an_unreachable_backend_neither_delays_nor_breaks_a_stored_dispatch(
    name: str, backend: str, open_stall: OpenStall
) -> None:
    stall = open_stall(config={"result_backend": UNREACHABLE[backend]()})
    with Session(stall.engine) as session, quickly():
        session.begin()
        result = DISPATCHES[name](stall)
        session.commit()
        del result  # results are quiet when they go, too
    assert stall.names


@every_backend
def test_an_unreachable_backend_does_not_matter_inside_a_task(
    backend: str, open_stall: OpenStall
) -> None:
    stall = open_stall(config={"result_backend": UNREACHABLE[backend]()})
    with running(stall.echo) as task, quickly():
        for dispatch in DISPATCHES.values():
            dispatch(stall)
        assert len(task.request.children) >= len(DISPATCHES)


# Celery's backend uses what redis-py 8 calls deprecated.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
@pytest.mark.parametrize("name", ["task", "group", "chain"])
def test_a_backend_that_was_down_at_the_dispatch_gives_the_result_when_it_is_up(
    name: str, open_stall: OpenStall, redis_url: str, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    address = urlsplit(redis_url)
    proxy = tcp_proxy(str(address.hostname), int(address.port or 0))
    proxy.refuse()
    stall = open_stall(config={"result_backend": proxy.through(redis_url)})
    with stall.transaction(), quickly():
        result = DISPATCHES[name](stall)
    proxy.listen()
    workers = open_stall(config={"result_backend": redis_url}).app.backend
    for each in getattr(result, "results", [result]):
        workers.mark_as_done(each.id, 3)
    assert result.get(timeout=10) in (3, [3] * 10)


def test_the_result_is_an_async_result_with_the_id_of_the_task(stall: Stall) -> None:
    with stall.transaction():
        made = stall.add.apply_async((1, 2), via_outbox=True)
        given = stall.add.apply_async((1, 2), task_id="order-77", via_outbox=True)
        sent = stall.app.send_task("other.run", via_outbox=True)
    assert [isinstance(each, AsyncResult) for each in (made, given, sent)] == [True] * 3
    assert [each.id for each in stall.stored()] == [made.id, "order-77", sent.id]
    for message in stall.stored():
        assert message.properties["correlation_id"] == message.headers["root_id"] == message.id


@pytest.fixture
def file_stall(open_stall: OpenStall, tmp_path: Path) -> Stall:
    """A stall that keeps results in files."""
    return open_stall(config={"result_backend": f"file://{tmp_path}", **memory_config()})


@pytest.mark.parametrize("pickled", [False, True])
def test_a_result_has_its_value_once_the_task_has_run(pickled: bool, file_stall: Stall) -> None:
    stall = file_stall
    with stall.transaction():
        result = stall.add.apply_async((1, 2), via_outbox=True)
        state = result.state
    if pickled:
        result = pickle.loads(pickle.dumps(result))
    stall.app.backend.mark_as_done(result.id, 3)
    assert (state, result.state, result.get(timeout=5), result.ready()) == (
        "PENDING",
        "SUCCESS",
        3,
        True,
    )
    result.forget()
    assert result.state == "PENDING"


def test_ignore_result_stays_what_it_was(mixed_stall: Stall) -> None:
    stall = mixed_stall
    quiet = stall.app.task(silence, name="stall.quiet", ignore_result=True, shared=False)
    with stall.transaction():
        results = [
            stall.add.apply_async((1, 2), ignore_result=True, via_outbox=True),
            quiet.apply_async(via_outbox=True),
            quiet.apply_async(ignore_result=False, via_outbox=True),
            stall.add.apply_async((1, 2), via_outbox=True),
        ]
    flags = [True, True, False, False]
    assert [each.headers["ignore_result"] for each in stall.stored()] == flags
    assert [bool(each.ignored) for each in results] == flags
    assert results[0].get(timeout=0.1) is None


def silence() -> None:
    """Has no result."""


def test_callbacks_of_a_result_are_called_when_it_is_asked_for(file_stall: Stall) -> None:
    stall = file_stall
    with stall.transaction():
        result = stall.add.apply_async((1, 2), via_outbox=True)
    stall.app.backend.mark_as_done(result.id, 3)
    seen: list[Any] = []
    result.get(timeout=5, callback=lambda id_, value: seen.append((id_, value)))
    assert seen == [(result.id, 3)]


def test_groups_are_saved_and_restored_and_joined(file_stall: Stall) -> None:
    stall = file_stall
    with stall.transaction():
        result = group(stall.adds(3)).apply_async(via_outbox=True)
        result.save()
    for number, each in enumerate(result.results):
        stall.app.backend.mark_as_done(each.id, number)
    restored = stall.app.GroupResult.restore(result.id)
    again = result_from_tuple(result.as_tuple(), app=stall.app)
    assert [each.join(timeout=5) for each in (result, restored, again)] == [[0, 1, 2]] * 3
    assert [isinstance(each, GroupResult) for each in (result, restored, again)] == [True] * 3
    assert result == restored == again
    assert [each.get(timeout=5) for each in result] == [0, 1, 2]


def test_the_parents_of_a_chain_can_be_followed(file_stall: Stall) -> None:
    stall = file_stall
    with stall.transaction():
        result = chain(stall.add.s(1, 1), stall.echo.s(), stall.echo.s()).apply_async(via_outbox=True)
    (first,) = stall.stored()
    assert result.parent.parent.id == first.id
    assert [each["options"]["task_id"] for each in first.embedded["chain"]] == [
        result.id,
        result.parent.id,
    ]


def test_a_result_equals_one_made_of_its_id(stall: Stall) -> None:
    with stall.transaction():
        result = stall.add.apply_async((1, 2), via_outbox=True)
    assert result == stall.app.AsyncResult(result.id) == stall.add.AsyncResult(result.id)
    assert (result.task_id, str(result), hash(result)) == (result.id, result.id, hash(result.id))


def plain_beside(stall: Stall) -> Celery:
    """An app without an outbox, set up like that of ``stall``."""
    plain = Celery("plain", set_as_current=False)
    plain.conf.update({key: stall.app.conf[key] for key in ("broker_url", "result_backend")})
    plain.conf.update(memory_config())
    add_tasks(plain)
    return plain


def test_direct_dispatches_tell_the_backend_what_plain_celery_tells_it(
    open_stall: OpenStall, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = open_stall(config={"result_backend": "cache+memory://", **memory_config()})
    plain, calls = plain_beside(stall), []
    for app in (plain, stall.app):
        told: list[Any] = []
        calls.append(told)
        for name in ("on_task_call", "add_pending_result", "set_chord_size", "apply_chord"):
            monkeypatch.setattr(
                app.backend,
                name,
                lambda *_, name=name, told=told, **__: told.append(name),
                raising=False,
            )
        add, total = app.tasks["stall.add"], app.tasks["stall.total"]
        add.apply_async((1, 2))
        add.apply_async((1, 2), ignore_result=True)
        group(add.s(1, 2), add.s(3, 4)).apply_async()
        chain(add.s(1, 2), add.s(3)).apply_async()
        chord([add.s(1, 2)], total.s()).apply_async()
        add.apply_async((1, 2)).then(lambda _: None)
        app.send_task("other.run")
    assert sorted(calls[0]) == sorted(calls[1])
    assert "add_pending_result" in calls[1]
