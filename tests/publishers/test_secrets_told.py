"""All that a relay's process says, whoever logs it, and the stored error: no password, no payload."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import kombu
import pytest
import sqlalchemy as sa
from kombu import Connection

from celery_outbox import ClaimedMessage, Outbox, Outcome, Publisher, Transport
from celery_outbox.relay.publishers.kombu import text_of
from tests.processes import HOST, unused_port
from tests.publishers.sqs_stub import Fault, SQSStub
from tests.relay.apps import make_outbox, relay_once, rows, send
from tests.relay.commands import environment, outbox_command, run
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import database_connection

__all__ = ["open_outbox"]

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

CARD = "4111-1111-1111-1111"
PASSWORD = "hunter2-is-secret"


def said_by_relay(outbox: Outbox, broker: str, database: str, **config: Any) -> str:
    """What the command says of one batch that it cannot deliver, and what is stored of it."""
    env = environment(broker=broker, database=database, config=config)
    done = run(outbox_command("relay", "--once"), env)
    (row,) = rows(outbox)
    outbox.app.close()
    kombu.pools.reset()
    return f"{done.stdout}\n{done.stderr}\n{row.error}"


def assert_no_payload(said: str) -> None:
    body = f'[["{CARD}", 2], {{}},'.encode()
    for secret in (CARD, base64.b64encode(body).decode()[:30], body.hex()[:30]):
        assert secret not in said


def unreachable(scheme: str) -> str:
    return f"{scheme}://user:{PASSWORD}@{HOST}:{unused_port()}/0"


@pytest.mark.parametrize(
    "scheme",
    ["redis", "sentinel", "amqp", "sqs", "sqla+postgresql+psycopg", "sqla+mysql+pymysql"],
)
def test_a_broker_that_cannot_be_reached_does_not_tell_its_password(
    scheme: str, sqlite_url: str
) -> None:
    broker = unreachable(scheme)
    outbox = make_outbox(broker, sqlite_url)
    send(outbox, CARD, 2)
    options = {"master_name": "shop", "sentinel_kwargs": {"password": PASSWORD}}
    config = {"broker_transport_options": options if scheme == "sentinel" else {}}
    said = said_by_relay(outbox, broker, sqlite_url, **config)
    assert "cannot be used" in said
    assert PASSWORD not in said
    assert_no_payload(said)


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_a_database_that_refuses_the_user_does_not_tell_the_password(
    server: str, sqlite_url: str, request: pytest.FixtureRequest
) -> None:
    url = sa.make_url(request.getfixturevalue(f"{server}_url"))
    wrong = url.set(username="nobody", password=PASSWORD).render_as_string(hide_password=False)
    broker = f"sqla+{wrong}"
    outbox = make_outbox(broker, sqlite_url)
    send(outbox, CARD, 2)
    said = said_by_relay(outbox, broker, sqlite_url)
    assert "nobody" in said
    assert PASSWORD not in said


def test_sqs_that_refuses_the_keys_does_not_tell_them(sqs_stub: SQSStub, sqlite_url: str) -> None:
    reason = f"The signature does not match. The Canonical String is\n'POST\n{PASSWORD}'"
    sqs_stub.faults.append(
        Fault(code="SignatureDoesNotMatch", status=403, reason=reason, operation="ListQueues")
    )
    broker = f"sqs://user:{PASSWORD}@{HOST}:{sqs_stub.port}//"
    outbox = make_outbox(broker, sqlite_url)
    send(outbox, CARD, 2)
    said = said_by_relay(outbox, broker, sqlite_url)
    assert "SignatureDoesNotMatch" in said
    assert PASSWORD not in said


#: Types of a column that quote what they cannot take.
TYPES = {
    "postgresql": "ALTER TABLE kombu_message ALTER payload TYPE integer USING 1",
    "mariadb": "ALTER TABLE kombu_message MODIFY payload INTEGER NOT NULL",
}


@pytest.mark.parametrize("server", TYPES)
def test_a_database_that_quotes_what_it_refuses_is_not_quoted(
    server: str, sqlite_url: str, request: pytest.FixtureRequest
) -> None:
    broker = f"sqla+{request.getfixturevalue(f'{server}_url')}"
    with Connection(broker) as connection:
        connection.default_channel.queue_declare("celery")
        connection.default_channel.session.close()
    with database_connection(broker) as connection:
        connection.exec_driver_sql(TYPES[server])
    outbox = make_outbox(broker, sqlite_url)
    send(outbox, CARD, 2, headers={"card": CARD})
    said = said_by_relay(outbox, broker, sqlite_url)
    assert "integer" in said
    assert_no_payload(said)


def test_a_constraint_of_the_users_own_on_the_outbox_does_not_quote_its_row(
    postgresql_url: str, redis_url: str
) -> None:
    outbox = make_outbox(redis_url, postgresql_url)
    send(outbox, CARD, 2, headers={"card": CARD})
    with database_connection(postgresql_url) as connection:
        connection.exec_driver_sql("ALTER TABLE celery_outbox ADD CHECK (attempts < 1)")
    said = said_by_relay(outbox, redis_url, postgresql_url)
    assert "celery_outbox_attempts_check" in said
    assert "Failing row" not in said
    assert_no_payload(said)


class Telling(Publisher):
    """Raises what repeats what it was given, and why."""

    is_connected = True

    def connect(self) -> None:
        """Nothing to do."""

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        self._fail(messages[0].body)

    def _fail(self, body: bytes) -> NoReturn:
        try:
            raise RuntimeError(f"refused: {body!r}")
        except RuntimeError as error:
            raise OSError(f"cannot reach redis://user:{PASSWORD}@host/0") from error

    def close(self) -> None:
        """Nothing to do."""


class TellingTransport(Transport):
    """The transport of that publisher."""

    def publisher(self, connection: Connection) -> Publisher:
        return Telling()


def test_no_traceback_tells_what_a_publisher_was_given(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    outbox = open_outbox(redis_url, sqlite_url, transports={"redis": TellingTransport})
    send(outbox, CARD, 2)
    relay_once(outbox)
    (row,) = rows(outbox)
    assert row.error == "OSError: cannot reach redis://user:***@host/0"
    assert any(record.levelname == "ERROR" for record in caplog.records)
    assert PASSWORD not in caplog.text
    assert_no_payload(caplog.text)


TEXTS = {
    "No master: <Redis(db=0,password=s3cret,port=1)>": "No master: <Redis(db=0,password=***,port=1)>",
    'password authentication failed for user "me"': 'password authentication failed for user "me"',
    'invalid integer: "{"body": "s3cret"': 'invalid integer: "',
    "E11000 duplicate key, full error: {'op': 's3cret'}": "E11000 duplicate key",
}


@pytest.mark.parametrize("text", TEXTS)
def test_of_an_error_only_that_is_kept_which_repeats_no_secret(text: str) -> None:
    assert text_of(RuntimeError(text)) == f"RuntimeError: {TEXTS[text]}"


def test_a_file_that_cannot_be_written_tells_its_path_alone(sqlite_url: str, tmp_path: Path) -> None:
    folders = {"data_folder_in": f"{tmp_path}/none", "data_folder_out": f"{tmp_path}/none"}
    config = {"broker_transport_options": folders}
    (tmp_path / "none").write_text("no folder")
    outbox = make_outbox("filesystem://", sqlite_url, config=config)
    send(outbox, CARD, 2)
    said = said_by_relay(outbox, "filesystem://", sqlite_url, **config)
    assert "none" in said
    assert_no_payload(said)
