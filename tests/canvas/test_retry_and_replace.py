"""retry() and replace() end by raising: they are sent directly, unless they say to store."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Task, chain, chord, group
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import before_task_publish

from celery_outbox.errors import OptionError
from tests.canvas.stall import OPTIONS, OpenStall, Stall, memory_config, running


@pytest.fixture
def default_stall(open_stall: OpenStall) -> Stall:
    """A stall of which every dispatch is stored, with a broker in memory."""
    return open_stall(default=True, config=memory_config())


def fail_with(
    stall: Stall, task: Task, act: Callable[[Task], Any], error: type[Exception], **request: Any
) -> None:
    """Be inside ``task``, with a transaction open, that ``act`` ends by raising."""
    with pytest.raises(error), stall.transaction(), running(task, **request):
        act(task)


@pytest.mark.parametrize("name", ["add", "charge"])
def test_a_retry_is_sent_whatever_the_defaults_say(name: str, default_stall: Stall) -> None:
    stall = default_stall
    task = getattr(stall, name)
    fail_with(stall, task, lambda it: it.retry(countdown=0), Retry, id="same", args=(1, 2), retries=1)
    (message,) = stall.sent
    assert (message.id, message.args, message.headers["retries"]) == ("same", [1, 2], 2)
    assert stall.names == []


def test_a_retry_that_says_so_is_stored_although_the_transaction_is_rolled_back(
    mixed_stall: Stall,
) -> None:
    stall = mixed_stall
    fail_with(
        stall,
        stall.add,
        lambda it: it.retry(countdown=60, via_outbox=True),
        Retry,
        id="same",
        args=(1, 2),
        retries=1,
        headers={"tenant": "a"},
    )
    (message,) = stall.stored()
    assert (message.id, message.args, message.headers["retries"]) == ("same", [1, 2], 2)
    assert message.headers["eta"]
    assert not [word for word in OPTIONS if word in message.text]
    assert stall.sent == []


def test_a_retry_may_name_a_database(two_stall: Stall) -> None:
    stall = two_stall
    with pytest.raises(Retry), stall.transaction("main"), running(stall.add, args=(1, 2)) as task:
        task.retry(outbox_database="billing")
    assert (len(stall.stored("billing")), stall.stored("main"), stall.sent) == (1, [], [])


def test_a_retry_with_an_option_that_makes_no_sense_is_refused(mixed_stall: Stall) -> None:
    stall = mixed_stall
    # Celery rejects a task whose retry cannot be sent.
    with pytest.raises(Reject) as caught, running(stall.add, args=(1, 2)) as task:
        task.retry(outbox_database="nowhere")
    assert isinstance(caught.value.reason, OptionError)
    assert (stall.names, stall.sent) == ([], [])


def test_a_retry_that_is_not_to_raise_is_sent_and_the_task_goes_on(default_stall: Stall) -> None:
    stall = default_stall
    with stall.transaction(), running(stall.add, args=(1, 2)) as task:
        task.retry(throw=False)
        stall.echo.delay("goes on")
    assert (stall.sent_names, stall.names) == (["add"], ["echo"])


@pytest.mark.parametrize("name", ["add", "charge"])
def test_a_replacement_is_sent_whatever_the_defaults_say(name: str, default_stall: Stall) -> None:
    stall = default_stall
    new = getattr(stall, name).s(3, 4)
    fail_with(stall, stall.echo, lambda it: it.replace(new), Ignore, id="same")
    (message,) = stall.sent
    assert (message.id, message.args, stall.names) == ("same", [3, 4], [])


def test_a_replacement_that_says_so_is_stored_although_the_transaction_is_rolled_back(
    mixed_stall: Stall,
) -> None:
    stall = mixed_stall
    fail_with(
        stall,
        stall.echo,
        lambda it: it.replace(stall.add.s(3, 4).set(via_outbox=True)),
        Ignore,
        id="same",
        root_id="root",
        chain=[stall.total.s()],
    )
    (message,) = stall.stored()
    assert (message.id, message.args, message.headers["root_id"]) == ("same", [3, 4], "root")
    assert [each["task"] for each in message.embedded["chain"]] == ["stall.total"]
    assert stall.sent == []


def test_a_chain_that_replaces_keeps_its_choice_when_it_is_continued(mixed_stall: Stall) -> None:
    stall = mixed_stall
    new = chain(stall.add.s(3, 4), stall.echo.s()).set(via_outbox=True)
    fail_with(stall, stall.echo, lambda it: it.replace(new), Ignore, chain=[stall.total.s()])
    (message,) = stall.stored()
    assert [each["task"] for each in message.embedded["chain"]] == ["stall.total", "stall.echo"]
    assert stall.sent == []


@pytest.fixture
def chord_stall(open_stall: OpenStall) -> Stall:
    """A stall of which every dispatch is stored, with results in memory."""
    stall = open_stall(default=True, config=memory_config() | {"result_backend": "cache+memory://"})
    stall.app.backend.client.cache.clear()
    return stall


def prepared(stall: Stall) -> int:
    """How many chords the backend has been told of."""
    return sum(b"taskset-meta" in bytes(key) for key in stall.app.backend.client.cache)


NEW: dict[str, Callable[[Stall], Any]] = {
    "group": lambda s: group(s.add.s(1, 1), s.charge.s(2, 2)),
    "chord": lambda s: chord([s.add.s(1, 1), s.charge.s(2, 2)], s.total.s()),
    "chain of a group": lambda s: chain(group(s.add.s(1, 1), s.charge.s(2, 2)), s.total.s()),
}


@pytest.mark.parametrize("name", NEW)
def test_a_canvas_that_replaces_is_sent_and_its_chord_can_end(name: str, chord_stall: Stall) -> None:
    stall = chord_stall
    fail_with(stall, stall.echo, lambda it: it.replace(NEW[name](stall)), Ignore)
    assert (stall.sent_names, stall.names, prepared(stall)) == (["add", "charge"], [], 1)


@pytest.mark.parametrize("name", NEW)
def test_a_stored_canvas_that_replaces_outlives_the_rollback(name: str, chord_stall: Stall) -> None:
    stall = chord_stall
    new = NEW[name](stall).set(via_outbox=True)
    fail_with(stall, stall.echo, lambda it: it.replace(new), Ignore)
    assert (stall.names, stall.sent, prepared(stall)) == (["add", "charge"], [], 1)


def test_what_a_handler_dispatches_during_a_retry_is_an_ordinary_dispatch(default_stall: Stall) -> None:
    stall = default_stall

    def audit(sender: str, **_: Any) -> None:
        if sender == "stall.add":
            stall.echo.delay("audit")

    before_task_publish.connect(audit)
    try:
        with stall.transaction(), running(stall.add, args=(1, 2)) as task:
            task.retry(throw=False)
    finally:
        before_task_publish.disconnect(audit)
    assert (stall.sent_names, stall.names) == (["add"], ["echo"])
