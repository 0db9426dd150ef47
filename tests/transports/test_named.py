"""Several brokers: each by its own URL, options and rules; one is the default."""

from datetime import timedelta

import pytest

from celery_outbox import Outbox
from celery_outbox.errors import ConfigurationError, OptionError
from tests.processes import unused_port
from tests.relay.apps import relay_once, rows, send
from tests.relay.wire import redis_envelopes
from tests.servers import RedisServer
from tests.transports.conftest import OpenStored

NOBODY = "redis://127.0.0.1:1/0"


def ids(url: str) -> list[str]:
    return [each["headers"]["id"] for each in redis_envelopes(url)]


def test_a_default_broker_gets_what_names_none(
    outbox_for: OpenStored, redis_server: RedisServer
) -> None:
    own, chosen = redis_server.empty_database(), redis_server.empty_database()
    outbox = outbox_for(own, brokers={"chosen": {"url": chosen, "default": True}})
    unnamed, named = send(outbox), send(outbox, outbox_broker="shop")
    outbox.app.send_task("shop.add", (1, 2))  # not through the outbox: Celery's own broker
    assert [row.broker for row in rows(outbox)] == ["chosen", "shop"]
    relay_once(outbox)
    assert ids(chosen) == [unnamed]
    assert named in ids(own)
    assert len(ids(own)) == 2


def test_naming_a_broker_chooses_the_outbox(outbox_for: OpenStored) -> None:
    outbox = outbox_for(NOBODY, brokers={"reports": NOBODY})
    outbox.app.tasks["shop.add"].apply_async((1, 2), outbox_broker="reports")
    assert [row.broker for row in rows(outbox)] == ["reports"]


def test_a_broker_that_nobody_knows_is_refused_and_nothing_is_stored(outbox_for: OpenStored) -> None:
    outbox = outbox_for(NOBODY, brokers={"reports": NOBODY})
    with pytest.raises(OptionError, match=r"expected one of \['reports', 'shop'\], got 'report'"):
        send(outbox, outbox_broker="report")
    assert rows(outbox) == []


def test_settings_of_the_apps_broker_are_not_those_of_another(outbox_for: OpenStored) -> None:
    config = {
        "broker_transport_options": {"queue_name_prefix": "shop-", "visibility_timeout": 60},
        "broker_use_ssl": {"ca_certs": "/nowhere"},
        "broker_user": "app",
        "broker_password": "app",
    }
    options = {"visibility_timeout": 7200}
    brokers = {"other": {"url": NOBODY, "transport_options": options}, "third": NOBODY}
    outbox = outbox_for(NOBODY, config=config, brokers=brokers)
    with outbox.brokers.connection("other") as other, outbox.brokers.connection("third") as third:
        assert (other.transport_options, third.transport_options) == (options, {})
        assert (other.userid, other.password, other.ssl) == (None, None, False)
    with outbox.brokers.connection("shop") as own:
        assert own.transport_options == config["broker_transport_options"]


@pytest.mark.parametrize(
    ("url", "options", "early"),
    [
        (NOBODY, {}, timedelta(minutes=30)),
        (NOBODY, {"visibility_timeout": 7200}, timedelta(hours=1)),
        ("amqp://127.0.0.1:1//", {}, timedelta(minutes=15)),
        ("sqs://127.0.0.1:1", {}, timedelta(minutes=15)),
        ("sqla+sqlite://", {}, timedelta(0)),
        ("filesystem://", {}, timedelta(0)),
    ],
    ids=["redis", "redis with a longer timeout", "amqp", "sqs", "database", "another"],
)
@pytest.mark.parametrize("given", [None, 0, 60])
def test_each_broker_has_its_own_rule_of_how_early_a_message_may_leave(
    outbox_for: OpenStored, url: str, options: dict[str, int], early: timedelta, given: int | None
) -> None:
    spec = {"url": url, "transport_options": options}
    spec |= {} if given is None else {"max_delay": given}
    outbox = outbox_for(NOBODY, brokers={"other": spec})
    send(outbox, outbox_broker="other", countdown=100_000)
    (row,) = rows(outbox)
    expected = early if given is None else timedelta(seconds=given)
    assert abs(row.deliver_at - row.scheduled_at - expected) < timedelta(milliseconds=2)


def test_a_broker_that_is_down_holds_up_no_other(outbox_for: OpenStored, redis_url: str) -> None:
    dead = f"redis://127.0.0.1:{unused_port()}/0"
    outbox = outbox_for(dead, brokers={"alive": redis_url})
    kept = send(outbox)
    sent = send(outbox, outbox_broker="alive")
    relay_once(outbox)
    assert ids(redis_url) == [sent]
    assert [(row.task_id, row.attempts) for row in rows(outbox)] == [(kept, 0)]


@pytest.mark.parametrize("is_list", [True, False])
def test_a_named_broker_may_have_alternates(
    outbox_for: OpenStored, redis_url: str, *, is_list: bool
) -> None:
    alternates = [f"redis://127.0.0.1:{unused_port()}/0", redis_url]
    url = alternates if is_list else ";".join(alternates)
    outbox = outbox_for(NOBODY, brokers={"reports": url})
    sent = send(outbox, outbox_broker="reports")
    relay_once(outbox)
    assert (ids(redis_url), rows(outbox)) == ([sent], [])


def test_a_stored_row_names_no_host(outbox_for: OpenStored) -> None:
    outbox = outbox_for("redis://:hunter2@secret.example:6390/0;redis://:hunter2@other.example/0")
    send(outbox)
    (row,) = rows(outbox)
    assert "example" not in repr(row)
    assert "hunter2" not in repr(row)


@pytest.mark.parametrize("url", ["carrier-pigeon://:hunter2@coop/0", "no-url-at-all://"])
def test_a_url_that_kombu_cannot_read_is_refused_without_its_password(
    outbox_for: OpenStored, url: str
) -> None:
    outbox = outbox_for(NOBODY, brokers={"other": url})
    with pytest.raises(ConfigurationError, match="broker 'other': expected a broker URL") as caught:
        send(outbox, outbox_broker="other")
    assert "hunter2" not in str(caught.value)
    assert rows(outbox) == []


def test_a_broker_may_become_another_while_its_messages_wait(
    outbox_for: OpenStored, redis_url: str, tmp_path: object
) -> None:
    outbox = outbox_for(NOBODY, brokers={"moving": "amqp://127.0.0.1:1//"})
    sent = [send(outbox, outbox_broker="moving") for _ in range(3)]
    later = Outbox(
        outbox.app.__class__("shop", broker=NOBODY, set_as_current=False),
        databases=dict(outbox.settings.databases),
        brokers={"moving": redis_url},
    )
    relay_once(later)
    assert ids(redis_url) == sent


def test_messages_for_a_broker_that_a_relay_does_not_know_are_left_alone(
    outbox_for: OpenStored, redis_url: str
) -> None:
    outbox = outbox_for(redis_url, brokers={"reports": NOBODY})
    send(outbox, outbox_broker="reports")
    without = Outbox(
        outbox.app.__class__("shop", broker=redis_url, set_as_current=False),
        databases=dict(outbox.settings.databases),
    )
    relay_once(without)
    (row,) = rows(outbox)
    assert (row.broker, row.attempts, row.claim_token) == ("reports", 0, None)
