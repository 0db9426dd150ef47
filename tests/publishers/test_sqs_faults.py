"""SQS: what is refused, lost or in doubt is told apart, and holds nothing else."""

import signal
import threading
from collections.abc import Callable
from typing import Any, get_args
from urllib.parse import urlsplit

import pytest
from kombu import Connection, Exchange

from celery_outbox.message import ClaimedMessage
from celery_outbox.publishing import Outcome
from celery_outbox.relay.publishers import publisher_for
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers.batches import message, publish
from tests.publishers.conftest import OpenPublisher
from tests.publishers.sqs_stub import Cut, Fault, Json, SQSStub
from tests.publishers.sqs_wire import arrived, envelope, names, rows
from tests.waiting import wait_until

THREADS = "celery-outbox-sqs"


def naming(*messages: ClaimedMessage) -> Callable[[Json], bool]:
    """Fits entries of these messages."""
    known = names(messages)
    return lambda entry: envelope(entry["MessageBody"])["headers"]["id"] in known


def carrying(*messages: ClaimedMessage) -> Callable[[Json], bool]:
    """Fits requests that carry one of these messages."""
    fits = naming(*messages)
    return lambda asked: any(map(fits, asked["Entries"]))


def test_a_refused_entry_stays_alone_with_its_reason(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = [message() for _ in range(12)]
    stub.faults.append(Fault(refuse=naming(messages[3], messages[11]), reason="too odd"))
    outcome = publish(open_publisher(stub.url), messages)
    assert outcome.errors == {messages[3].id: "Odd: too odd", messages[11].id: "Odd: too odd"}
    assert outcome.accepted == rows(messages) - outcome.errors.keys()
    assert not outcome.is_connection_lost


def test_an_entry_of_which_nothing_is_said_is_not_called_accepted(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = [message() for _ in range(3)]
    stub.faults.append(Fault(omit=naming(messages[1])))
    outcome = publish(open_publisher(stub.url), messages)
    assert outcome.accepted == {messages[0].id, messages[2].id}
    assert "said nothing" in outcome.errors[messages[1].id]


@pytest.mark.parametrize("cut", get_args(Cut))
def test_a_cut_leaves_every_message_on_the_broker_or_with_an_answer_that_says_so(
    cut: Cut, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url)
    messages = [message() for _ in range(35)]
    stub.faults.append(Fault(cut=cut, times=1))
    outcome = publish(publisher, messages)
    named = {each.id: each.task_id for each in messages}
    assert {named[row] for row in outcome.accepted} <= arrived(stub)
    assert len(outcome.errors) in {5, 10}
    assert all("not known" in text for text in outcome.errors.values())
    has_done = cut in {"before replying", "within the reply"}
    in_doubt = {named[row] for row in outcome.errors}
    assert in_doubt & arrived(stub) == (in_doubt if has_done else set())
    if not publisher.is_connected:
        publisher.connect()
    rest = [each for each in messages if each.id not in outcome.accepted]
    assert publish(publisher, rest).accepted == rows(rest)
    assert arrived(stub) == names(messages)
    assert len(stub.bodies()) == len(messages) + (len(in_doubt) if has_done else 0)


def test_after_an_answer_that_did_not_come_nothing_more_is_begun(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url, **{"client-config": {"read_timeout": 0.3}})
    publish(publisher, [message()])
    answered = threading.Event()
    stub.faults.append(Fault(until=answered))
    messages = [message() for _ in range(200)]
    outcome = publish(publisher, messages)
    answered.set()
    assert len(outcome.errors) == 80
    assert all("not known" in text for text in outcome.errors.values())
    assert (len(outcome.unsent), outcome.accepted) == (120, frozenset())
    assert outcome.is_connection_lost


def test_what_never_left_is_unsent_and_goes_over_a_new_connection(
    stub: SQSStub, open_publisher: OpenPublisher, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    proxy = tcp_proxy(HOST, stub.port)
    publisher = open_publisher(proxy.through(stub.url))
    publish(publisher, [message()])
    proxy.refuse()
    proxy.cut()
    messages = [message(), message("other"), message()]
    outcome = publish(publisher, messages)
    assert outcome.unsent == rows(messages)
    assert outcome.is_connection_lost
    assert not publisher.is_connected
    with pytest.raises(Exception, match="Could not connect"):
        publisher.connect()
    proxy.listen()
    publisher.connect()
    assert publish(publisher, messages).accepted == rows(messages)


def test_a_fanout_whose_answer_did_not_come_is_in_doubt(
    sqs_url: str, open_publisher: OpenPublisher, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    proxy = tcp_proxy(HOST, urlsplit(sqs_url).port or 0)
    options: dict[str, Any] = {"client-config": {"read_timeout": 0.5}, "region": "us-east-1"}
    publisher = open_publisher(proxy.through(sqs_url), supports_fanout=True, **options)
    everyone = Exchange("all", "fanout")
    told = [message(exchange=everyone, routing_key="", declare=[everyone]) for _ in range(3)]
    assert publish(publisher, told[:1]).accepted == rows(told[:1])
    proxy.swallow_replies()
    outcome = publish(publisher, told[1:])
    assert (list(outcome.errors), outcome.unsent) == ([told[1].id], {told[2].id})
    assert "not known" in outcome.errors[told[1].id]
    assert outcome.is_connection_lost


@pytest.mark.parametrize(
    ("code", "status", "is_known"),
    [
        ("ThrottlingException", 400, True),
        ("RequestThrottled", 403, True),
        ("KmsThrottled", 400, True),
        ("TooManyRequests", 429, True),
        ("Strange", 429, True),
        ("AccessDenied", 403, True),
        ("KmsAccessDenied", 400, True),
        ("ServiceUnavailable", 503, False),
        ("InternalFailure", 500, False),
    ],
)
def test_a_request_that_is_refused_stops_its_messages_alone(
    code: str, status: int, is_known: bool, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    refused, others = [message("bad") for _ in range(20)], [message() for _ in range(20)]
    stub.faults.append(Fault(code=code, status=status, only=carrying(*refused)))
    publisher = open_publisher(stub.url)
    outcome = publish(publisher, [*refused, *others])
    assert set(outcome.errors) == rows(refused)
    assert all(code in text and "because of a test" in text for text in outcome.errors.values())
    assert all(("not known" not in text) is is_known for text in outcome.errors.values())
    assert outcome.accepted == rows(others)
    assert publisher.is_connected
    # Neither one by one nor again: the relay's backoff is the retry.
    assert len(stub.batches()) == 4


@pytest.mark.parametrize(
    "code", ["BatchRequestTooLong", "InvalidMessageContents", "InvalidParameterValue", "SomethingNew"]
)
def test_of_a_batch_that_is_refused_for_one_message_only_that_one_stays(
    code: str, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = [message() for _ in range(14)]
    stub.faults.append(Fault(code=code, only=carrying(messages[4])))
    outcome = publish(open_publisher(stub.url), messages)
    assert set(outcome.errors) == {messages[4].id}
    assert code in outcome.errors[messages[4].id]
    assert outcome.accepted == rows(messages) - {messages[4].id}
    assert len(stub.bodies()) == 13


def test_batches_that_are_too_long_for_a_queue_go_one_by_one(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.faults.append(Fault(code="BatchRequestTooLong", only=lambda asked: len(asked["Entries"]) > 1))
    messages = [message() for _ in range(25)]
    assert publish(open_publisher(stub.url), messages).accepted == rows(messages)
    assert len(stub.bodies()) == 25
    assert len(stub.batches()) == 3 + 25


def test_what_botocore_itself_refuses_stays_alone_and_its_value_is_not_told(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    attributes = {"card": {"DataType": "String", "StringValue": ["4111 1111"]}}
    odd = [
        message(properties={"message_attributes": attributes}),
        message(properties={"message_attributes": {"card": "4111 1111"}}),
        message(properties={"message_attributes": "4111 1111"}),
        message(properties={"MessageGroupId": 7}),
    ]
    others = [message() for _ in range(3)]
    outcome = publish(open_publisher(stub.url), [*others, *odd])
    assert set(outcome.errors) == rows(odd)
    assert "MessageGroupId" in outcome.errors[odd[3].id]
    assert "4111" not in str(outcome.errors)
    assert outcome.accepted == rows(others)


def test_what_cannot_be_read_or_has_no_queue_holds_no_other(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    corrupt = [message()._replace(envelope=text) for text in ("{}", "corrupt")]
    exchange = Exchange("orders", "direct")
    lost = message(exchange=exchange, routing_key="nowhere", declare=[exchange])
    others = [message(), message()]
    publisher = open_publisher(stub.url)
    outcome = publish(publisher, [others[0], *corrupt, lost, others[1]])
    assert set(outcome.errors) == {*rows(corrupt), lost.id}
    assert "expected a queue bound" in outcome.errors[lost.id]
    assert outcome.accepted == rows(others)
    assert publisher.is_connected


def test_nothing_is_begun_after_the_lease(stub: SQSStub, open_publisher: OpenPublisher) -> None:
    publisher = open_publisher(stub.url)
    messages = [message() for _ in range(3)]
    outcome = publish(publisher, messages, seconds=-1)
    assert outcome == Outcome(unsent=rows(messages))
    assert stub.asked() == []
    publish(publisher, messages)
    stub.seconds = 0.4
    messages = [message() for _ in range(200)]
    outcome = publish(publisher, messages, seconds=0.6)
    assert (len(outcome.accepted), len(outcome.unsent)) in {(160, 40), (80, 120)}
    assert len(stub.bodies()) == 3 + len(outcome.accepted)
    assert not outcome.is_connection_lost


def test_the_limits_of_time_are_those_of_the_broker_where_it_has_some(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    never = threading.Event()
    stub.faults.append(Fault(until=never))
    config: dict[str, Any] = {"read_timeout": 0.2, "retries": {"total_max_attempts": 2}}
    publisher = open_publisher(stub.url, **{"client-config": config})
    outcome = publish(publisher, [message()])
    never.set()
    assert len(outcome.errors) == 1
    assert len(stub.asked()) == 2


def test_the_limits_of_time_lie_well_within_a_lease_by_default() -> None:
    connection = Connection("sqs://")
    publisher_for(connection)
    config = connection.transport_options["client-config"]
    assert (config["connect_timeout"], config["read_timeout"]) == (10, 30)


def test_an_interrupt_passes_through_and_leaves_no_thread(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url)
    answered = threading.Event()
    stub.faults.append(Fault(until=answered))

    def interrupt() -> None:
        wait_until(lambda: len(stub.batches()) == 2)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        answered.set()

    beside = threading.Thread(target=interrupt)
    # Where the tests were started in the background, the signal is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    beside.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            publish(publisher, [message() for _ in range(20)])
    finally:
        signal.signal(signal.SIGINT, before)
    beside.join()
    assert not publisher.is_connected
    assert not [each for each in threading.enumerate() if each.name.startswith(THREADS)]


def test_an_exit_within_a_request_passes_through(
    stub: SQSStub, open_publisher: OpenPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher(stub.url)
    publish(publisher, [message()])

    def leave(*_: Any) -> None:
        raise SystemExit(3)

    monkeypatch.setattr("botocore.httpsession.URLLib3Session.send", leave)
    with pytest.raises(SystemExit):
        publish(publisher, [message()])
    assert not publisher.is_connected


def test_a_closed_publisher_leaves_no_thread_and_no_connection(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url)
    publish(publisher, [message()])
    assert [each for each in threading.enumerate() if each.name.startswith(THREADS)]
    assert stub.connections > 0
    publisher.close()
    assert not [each for each in threading.enumerate() if each.name.startswith(THREADS)]
    wait_until(lambda: stub.connections == 0)
