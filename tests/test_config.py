"""Settings: where they may stand, what each takes, and how every wrong one is refused."""

import re
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from sqlalchemy.ext.asyncio import create_async_engine

from celery_outbox import Outbox
from celery_outbox.config import BrokerSpec, parse_duration
from celery_outbox.errors import ConfigurationError
from celery_outbox.policy import RetryPolicy

URL = "sqlite:///orders.db"
SECRET = "hunter2"
SECRET_URL = f"postgresql+psycopg://shop:{SECRET}@db/orders"


def make_outbox(main: str | None = "shop", **settings: Any) -> Outbox:
    return Outbox(Celery(main, set_as_current=False), **{"databases": {"default": URL}} | settings)


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        _ = make_outbox(**settings).settings
    return str(caught.value)


def test_only_the_databases_have_to_be_given() -> None:
    settings = make_outbox().settings
    assert settings.name == "shop"
    assert settings.table == "celery_outbox"
    assert settings.retry_after == timedelta(seconds=300)
    assert settings.retry == RetryPolicy(
        max_attempts=None, base_delay=timedelta(seconds=1), max_delay=timedelta(seconds=600)
    )
    assert (settings.default, settings.require_transaction, settings.keep) == (False, False, False)
    assert settings.notify is True
    assert settings.brokers == {}


GIVEN = {
    "table": ("queue.outbox", "queue.outbox"),
    "name": ("orders", "orders"),
    "retry_after": ("15m", timedelta(minutes=15)),
    "default": (True, True),
    "require_transaction": (True, True),
    "keep": (True, True),
    "notify": (False, False),
    "retry": (
        {"max_attempts": 3, "base_delay": "2s", "max_delay": 0.5e3},
        RetryPolicy(max_attempts=3, base_delay=timedelta(seconds=2), max_delay=timedelta(seconds=500)),
    ),
    "brokers": (
        {"reports": "redis://h/1", "late": {"url": "sqs://", "max_delay": "1h", "default": True}},
        {
            "reports": BrokerSpec(url="redis://h/1"),
            "late": BrokerSpec(url="sqs://", max_delay=timedelta(hours=1), default=True),
        },
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_setting_is_taken_from_the_keyword_argument(name: str) -> None:
    given, expected = GIVEN[name]
    assert getattr(make_outbox(**{name: given}).settings, name) == expected


@pytest.mark.parametrize("name", GIVEN)
def test_a_setting_is_taken_from_the_configuration_of_celery(name: str) -> None:
    given, expected = GIVEN[name]
    outbox = make_outbox()
    outbox.app.conf.update({f"outbox_{name}": given})
    assert getattr(outbox.settings, name) == expected


def test_the_configuration_may_use_a_namespace() -> None:
    module = SimpleNamespace(CELERY_OUTBOX_DATABASES={"default": URL}, CELERY_OUTBOX_TABLE="spaced")
    app = Celery("shop", set_as_current=False)
    outbox = Outbox(app)
    app.config_from_object(module, namespace="CELERY")
    assert outbox.settings.table == "spaced"


def test_the_configuration_may_be_loaded_after_the_outbox_was_made() -> None:
    app = Celery("shop", set_as_current=False)
    outbox = Outbox(app)
    app.conf.outbox_databases = {"default": URL}
    assert list(outbox.settings.databases) == ["default"]


def test_a_keyword_argument_beats_the_configuration() -> None:
    outbox = make_outbox(table="given")
    outbox.app.conf.outbox_table = "configured"
    assert outbox.settings.table == "given"


def test_the_first_database_is_the_default_whatever_its_name() -> None:
    outbox = make_outbox(databases={"zebra": "sqlite:///z.db", "ant": "sqlite:///a.db"})
    assert list(outbox.databases) == ["zebra", "ant"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: URL,
        lambda: sa.make_url(URL),
        lambda: sa.create_engine(URL),
        lambda: create_async_engine("sqlite+aiosqlite:///orders.db"),
    ],
    ids=["text", "URL", "Engine", "AsyncEngine"],
)
def test_a_database_may_be_given_in_each_form(make: Callable[[], Any]) -> None:
    outbox = make_outbox(databases={"default": make()})
    assert outbox.databases["default"].url.database == "orders.db"


def test_an_unknown_setting_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"no settings but \[.*'table'.*got \['tabel'\]"):
        make_outbox(tabel="typo")


def test_settings_are_read_at_the_first_need_and_not_before() -> None:
    outbox = make_outbox(table="not a name")
    with pytest.raises(ConfigurationError, match="table"):
        _ = outbox.settings


@pytest.mark.parametrize("main", [None, "__main__"])
def test_an_app_without_a_name_that_lasts_is_refused(main: str | None) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _ = make_outbox(main).settings
    text = str(caught.value)
    assert repr(main) in text
    assert 'Celery("shop")' in text
    assert 'Outbox(app, name="shop")' in text


@pytest.mark.parametrize("main", [None, "__main__"])
def test_outbox_name_stands_in_for_a_missing_main(main: str | None) -> None:
    assert make_outbox(main, name="shop").settings.name == "shop"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"databases": None}, r"outbox_databases: expected a mapping .*got None\. Write for example"),
    ({"databases": {}}, r"databases: expected a mapping of at least one name .*Write for example"),
    ({"databases": {"": URL}}, r"databases, a key: expected a name, not empty, got ''"),
    ({"databases": {7: URL}}, r"databases, a key: expected a name, not empty, got 7"),
    ({"databases": {"main": 7}}, r"databases\['main'\]: expected an engine, an AsyncEngine or a URL"),
    ({"databases": {"main": "no url"}}, r"databases\['main'\]: expected an SQLAlchemy database URL"),
    ({"table": "no name"}, r"table: expected a name of letters, digits and _ .*got 'no name'"),
    ({"table": "a.b.c"}, r"table: expected a name of letters"),
    ({"table": "1st"}, r"table: expected a name of letters"),
    ({"table": 'x"; DROP TABLE orders --'}, r"table: expected a name of letters"),
    ({"table": "t" * 64}, r"table: expected at most 63 characters in a name, .*shorter one"),
    ({"table": "s" * 64 + ".outbox"}, r"table: expected at most 63 characters in a name"),
    ({"table": "täble"}, r"table: expected a name of letters"),
    ({"table": "outbox\n"}, r"table: expected a name of letters"),
    ({"table": ""}, r"table: expected a name of letters"),
    ({"table": ".outbox"}, r"table: expected a name of letters"),
    ({"table": 7}, r"table: expected a name of letters"),
    ({"name": " "}, r"name: expected a name, not empty, got ' '"),
    ({"name": "a\0b"}, r"name: expected a name"),
    ({"name": "n" * 192}, r"name: expected at most 191 characters"),
    ({"retry_after": 0.5}, r"retry_after: expected a lease of at least one second, got 0\.5"),
    ({"retry_after": "soon"}, r"retry_after: expected a number of seconds or text such as .*'soon'"),
    ({"retry_after": -5}, r"retry_after: expected .*not negative, got -5"),
    ({"retry_after": True}, r"retry_after: expected a number of seconds"),
    ({"default": "yes"}, r"default: expected True or False, got 'yes'"),
    ({"require_transaction": 1}, r"require_transaction: expected True or False, got 1"),
    ({"keep": 0}, r"keep: expected True or False, got 0"),
    ({"notify": "no"}, r"notify: expected True or False, got 'no'"),
    ({"retry": 3}, r"retry: expected a mapping with some of .*got 3"),
    ({"retry": {"tries": 3}}, r"retry: expected a mapping with some of \['base_delay', 'max_attempts'"),
    ({"retry": {"max_attempts": 0}}, r"retry\['max_attempts'\]: expected None or a whole number"),
    ({"retry": {"max_attempts": True}}, r"retry\['max_attempts'\]: expected None or a whole number"),
    ({"retry": {"max_attempts": 1.5}}, r"retry\['max_attempts'\]: expected None or a whole number"),
    ({"retry": {"base_delay": 0}}, r"retry: expected 0 < base_delay <= max_delay"),
    ({"retry": {"base_delay": 9, "max_delay": 8}}, r"retry: expected 0 < base_delay <= max_delay"),
    ({"retry": {"base_delay": "x"}}, r"retry\['base_delay'\]: expected a number of seconds"),
    ({"retry": {"max_delay": None}}, r"retry\['max_delay'\]: expected a number of seconds"),
    ({"retry": {"base_delay": -1}}, r"retry\['base_delay'\]: expected .*, not negative, got -1"),
    ({"retry": {"base_delay": 1e-9}}, r"retry: expected 0 < base_delay"),
    ({"retry": {"base_delay": float("nan")}}, r"retry\['base_delay'\]: expected a number of seconds"),
    (
        {"retry": {"max_delay": "3651d"}},
        r"retry: expected .* <= max_delay <= 3650 days, got .*3651 days",
    ),
    (
        {"retry": {"max_attempts": 2**63}},
        r"retry\['max_attempts'\]: expected .* at most 9223372036854775807",
    ),
    (
        {"retry": RetryPolicy(max_attempts=0)},
        r"retry\['max_attempts'\]: expected None or a whole number",
    ),
    ({"retry": RetryPolicy(max_delay=timedelta(0))}, r"retry: expected 0 < base_delay <= max_delay"),
    ({"brokers": "redis://h"}, r"brokers: expected a mapping of broker names to URLs"),
    ({"brokers": {"": "redis://h"}}, r"brokers, a key: expected a name, not empty"),
    (
        {"brokers": {"x": 7}},
        r"brokers\['x'\]: expected a broker URL, a list of alternates, or a mapping .*got int",
    ),
    ({"brokers": {"x": {"uri": "redis://h"}}}, r"brokers\['x'\]: expected no keys but .*\['uri'\]"),
    ({"brokers": {"x": {"default": True}}}, r"brokers\['x'\]: expected a broker URL, a list"),
    ({"brokers": {"x": ["redis://h", 7]}}, r"brokers\['x'\]: expected a broker URL, a list"),
    ({"brokers": {"x": []}}, r"brokers\['x'\]: expected a broker URL, a list"),
    (
        {"brokers": {name: {"url": "redis://h", "default": True} for name in "ab"}},
        r"brokers: expected at most one broker with 'default': True, got \['a', 'b'\]",
    ),
    ({"transports": "redis"}, r"transports: expected a mapping of URL schemes to classes"),
    ({"transports": {"redis": 7}}, r"transports\['redis'\]: expected a class or the path of one"),
    (
        {"brokers": {"x": {"url": "redis://h", "delay": 1}}},
        r"brokers\['x'\]: expected no keys but .*got \['delay'\]",
    ),
    (
        {"brokers": {"x": {"url": "redis://h", "transport_options": 7}}},
        r"brokers\['x'\]\['transport_options'\]: expected a mapping",
    ),
    (
        {"brokers": {"x": {"url": "redis://h", "default": 1}}},
        r"brokers\['x'\]\['default'\]: expected True or False, got 1",
    ),
    (
        {"brokers": {"x": {"url": "redis://h", "max_delay": "z"}}},
        r"brokers\['x'\]\['max_delay'\]: expected a number of seconds",
    ),
    ({"brokers": {"shop": "redis://h"}}, r"expected names other than this app's own, found 'shop'"),
]


@pytest.mark.parametrize(("settings", "pattern"), WRONG, ids=[repr(each) for each, _ in WRONG])
def test_a_wrong_setting_is_refused_with_what_was_expected_and_found(
    settings: dict[str, Any], pattern: str
) -> None:
    text = refusal(**settings)
    assert re.search(pattern, text), text


def test_an_error_names_the_configuration_key_where_the_value_came_from_there() -> None:
    outbox = make_outbox()
    outbox.app.conf.outbox_retry_after = "soon"
    with pytest.raises(ConfigurationError, match=r"^outbox_retry_after: "):
        _ = outbox.settings


@pytest.mark.parametrize(
    "settings",
    [
        {"databases": SECRET_URL},
        {"databases": [SECRET_URL]},
        {"databases": {"main": [SECRET_URL]}},
        {"databases": {"main": f"shop:{SECRET}@db"}},
        {"databases": {"main": SECRET_URL.replace("postgresql+psycopg", "nothing+here")}},
        {"databases": {"one": SECRET_URL, "two": SECRET_URL}},
        {"databases": {"main": SECRET_URL.replace("psycopg", "no_such_driver")}},
        {"brokers": f"redis://:{SECRET}@h/1"},
        {"brokers": [f"redis://:{SECRET}@h/1"]},
        {"brokers": {"x": [f"redis://:{SECRET}@h/1", 7]}},
        {"brokers": {"x": {"uri": f"redis://:{SECRET}@h/1"}}},
        {"brokers": {"x": {"url": "redis://h", "transport_options": f"password={SECRET}"}}},
    ],
    ids=str,
)
def test_no_error_repeats_a_password(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _ = make_outbox(**settings).databases
    assert SECRET not in f"{caught.value} {caught.value.__cause__}"


def test_two_names_for_one_table_are_refused() -> None:
    outbox = make_outbox(databases={"one": URL, "two": f"{URL}"})
    with pytest.raises(ConfigurationError, match=r"'one' and 'two' are the same\. Leave one"):
        _ = outbox.databases


def test_an_unsupported_database_is_refused() -> None:
    outbox = make_outbox(databases={"main": "oracle+oracledb://h/x"})
    with pytest.raises(ConfigurationError, match=r"PostgreSQL, MySQL, MariaDB or SQLite, .*oracle"):
        _ = outbox.databases


def test_an_engine_that_commits_each_statement_is_refused() -> None:
    engine = sa.create_engine(URL, isolation_level="AUTOCOMMIT")
    outbox = make_outbox(databases={"main": engine})
    with pytest.raises(ConfigurationError, match=r"'main'.*AUTOCOMMIT.*execution_options"):
        _ = outbox.databases


def test_an_outbox_belongs_to_one_app() -> None:
    outbox = make_outbox()
    with pytest.raises(ConfigurationError, match="one Outbox for each app"):
        outbox.init_app(Celery("other", set_as_current=False))
    with pytest.raises(ConfigurationError, match="one Outbox for each app"):
        Outbox(outbox.app)


def test_an_outbox_without_an_app_says_how_to_get_one() -> None:
    outbox = Outbox(databases={"default": URL})
    with pytest.raises(ConfigurationError, match=r"Call outbox\.init_app\(app\)"):
        _ = outbox.settings


def test_an_app_may_be_given_later() -> None:
    outbox = Outbox(databases={"default": URL})
    outbox.init_app(Celery("shop", set_as_current=False))
    assert outbox.settings.name == "shop"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (1.5, 1.5),
        (0, 0),
        ("90", 90),
        ("90s", 90),
        (" 90s ", 90),
        ("0.5s", 0.5),
        ("15m", 900),
        ("12h", 43200),
        ("7d", 604800),
        (timedelta(minutes=2), 120),
    ],
)
def test_a_duration_is_read_in_each_of_its_forms(text: object, seconds: float) -> None:
    assert parse_duration(text, "x") == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    ["", "s", "5w", "1h30m", "-5", "five", "1e3", "٣x", None, True, [], 1e30, float("nan"), -1, b"5"],
)
def test_everything_else_is_no_duration(text: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^the wait: expected a number of seconds or text"):
        parse_duration(text, "the wait")
