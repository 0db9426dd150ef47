"""The wire is cut in every phase of a batch: nothing is accepted that the broker does not have."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers.batches import connected, message, publish
from tests.relay.wire import take

QUEUES = ("one", "two", "three")

#: Bytes that still pass, counted from the end when negative; and whether of the replies.
PHASES = {
    "before anything is sent": (0, False),
    "in the first message": (700, False),
    "between messages": (20_000, False),
    "in the last message": (-300, False),
    "before the reply": (0, True),
    "in the first byte of the reply": (1, True),
    "in the reply": (8, True),
    "before the reply's last byte": (14, True),
}


class Held:
    """What a broker got, the copies of each message without their delivery tags."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.copies: dict[str, list[Any]] = {}

    def look(self) -> set[str]:
        """Take what has come since, and tell the ids of all."""
        contents = take(self._url, *QUEUES, keeps_declared=True)
        for queue in QUEUES:
            for each in contents.get(queue, []):
                each["properties"].pop("delivery_tag", None)
                self.copies.setdefault(each["headers"]["id"], []).append(each)
        return set(self.copies)


def batch() -> list[Any]:
    return [message(queue, body=bytes([number]) * 1000) for number in range(10) for queue in QUEUES]


@pytest.mark.parametrize("server", ["redis", "rabbitmq"])
@pytest.mark.parametrize("phase", PHASES)
def test_each_message_of_a_batch_that_is_cut_is_on_the_broker_or_not_accepted(
    phase: str, server: str, tcp_proxy: Callable[[str, int], TcpProxy], request: Any
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    proxy = tcp_proxy(HOST, int(url.rpartition("/")[0].rpartition(":")[2]))
    publisher = connected(proxy.through(url))
    publish(publisher, batch())
    before = proxy.passed[False]
    assert len(publish(publisher, batch()).accepted) == 30
    usual = proxy.passed[False] - before
    Held(url).look()

    size, of_replies = PHASES[phase]
    proxy.cut_after(size if size >= 0 else usual + size, of_replies=of_replies)
    messages, held = batch(), Held(url)
    outcome = publish(publisher, messages)
    assert outcome.is_connection_lost
    accepted = [each for each in messages if each.id in outcome.accepted]
    assert {each.task_id for each in accepted} <= held.look()
    assert len(accepted) < len(messages)

    rest = [each for each in messages if each.id not in outcome.accepted]
    publisher.connect()
    assert publish(publisher, rest).accepted == {each.id for each in rest}
    assert held.look() == {each.task_id for each in messages}
    for each in messages:
        copies = held.copies[each.task_id]
        assert copies == [copies[0]] * len(copies)
        assert len(copies) == 1 or each in rest
    if phase == "before anything is sent":
        assert {len(copies) for copies in held.copies.values()} == {1}
    publisher.close()
