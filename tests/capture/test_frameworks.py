"""The Sessions of SQLModel and Flask-SQLAlchemy are found like any other."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import flask
import pytest
import sqlalchemy as sa
import sqlmodel
from celery import Celery
from flask_sqlalchemy import SQLAlchemy

from celery_outbox import Outbox
from celery_outbox.errors import TransactionError
from tests.capture.shop import TASK_NAME, TRACKING_LOGGER, OutOfStockError, Shop, orders, tasks


class Order(sqlmodel.SQLModel, table=True):
    __tablename__ = "orders"
    id: int = sqlmodel.Field(primary_key=True)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_sqlmodels_session_is_found(shop: Shop, end: str) -> None:
    with sqlmodel.Session(shop.engine) as session:
        session.add(Order(id=1))
        shop.send("a")
        getattr(session, end)()
    assert (shop.orders, shop.tasks) == (([1], ["a"]) if end == "commit" else ([], []))


class Site:
    """A Flask application with a default database and a bind named billing."""

    def __init__(self, celery: Celery, default_url: str, billing_url: str) -> None:
        self.flask = flask.Flask("site")
        self.flask.config["SQLALCHEMY_DATABASE_URI"] = default_url
        self.flask.config["SQLALCHEMY_BINDS"] = {"billing": billing_url}
        self.flask.testing = True
        self.db = SQLAlchemy(self.flask)
        self.celery = celery

        class Order(self.db.Model):
            __tablename__ = "orders"
            id = sa.Column(sa.Integer, primary_key=True, autoincrement=False)

        class Bill(self.db.Model):
            __tablename__ = "orders"
            __bind_key__ = "billing"
            id = sa.Column(sa.Integer, primary_key=True, autoincrement=False)

        self.models: dict[str, Any] = {"main": Order, "billing": Bill}
        with self.flask.app_context():
            self.db.create_all()
            self.engines = {"main": self.db.engine, "billing": self.db.engines["billing"]}

    def install(self, *names: str) -> Outbox:
        databases = {name: self.engines[name] for name in names}
        outbox = Outbox(self.celery, databases=databases, require_transaction=True)
        outbox.install()
        return outbox

    def send(self, task_id: str, **options: Any) -> None:
        task = self.celery.tasks[TASK_NAME]
        task.apply_async(task_id=task_id, **{"via_outbox": True} | options)

    def request(self, work: Callable[[], None]) -> None:
        """Serve one request that does `work`, in an application that has served none."""
        self.flask.add_url_rule("/", "work", lambda: (work(), "done")[1])
        assert self.flask.test_client().get("/").text == "done"


@pytest.fixture
def site(make_app: Callable[..., Celery], sqlite_url: str, other_url: str) -> Iterator[Site]:
    opened = Site(make_app(), sqlite_url, other_url)
    yield opened
    for engine in opened.engines.values():
        engine.dispose()


def test_flasks_session_stores_with_its_commit(site: Site) -> None:
    site.install("main")

    def work() -> None:
        for number, end in [(1, "rollback"), (2, "commit"), (3, "rollback")]:
            site.db.session.add(site.models["main"](id=number))
            site.send(str(number))
            getattr(site.db.session, end)()

    site.request(work)
    assert (orders(site.engines["main"]), tasks(site.engines["main"])) == ([2], ["2"])


def test_the_end_of_a_request_drops_what_was_not_committed(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, TRACKING_LOGGER)
    site.install("main")

    def work() -> None:
        site.db.session.add(site.models["main"](id=1))
        site.send("1")

    site.request(work)
    assert (orders(site.engines["main"]), tasks(site.engines["main"])) == ([], [])
    assert [TASK_NAME in each.getMessage() for each in caplog.records] == [True]


def test_an_error_in_a_request_leaves_neither_task_nor_order(site: Site) -> None:
    site.install("main")

    def work() -> None:
        site.db.session.add(site.models["main"](id=1))
        site.send("1")
        raise OutOfStockError

    with pytest.raises(OutOfStockError):
        site.request(work)
    assert (orders(site.engines["main"]), tasks(site.engines["main"])) == ([], [])


def test_requests_in_turn_keep_their_tasks_apart(site: Site) -> None:
    site.install("main")

    def work() -> None:
        number = int(flask.request.args.get("number", 0))
        site.db.session.add(site.models["main"](id=number))
        site.send(str(number))
        if number % 2:
            site.db.session.commit()

    site.flask.add_url_rule("/", "work", lambda: (work(), "done")[1])
    client = site.flask.test_client()
    for number in range(6):
        client.get(f"/?number={number}")
    assert tasks(site.engines["main"]) == ["1", "3", "5"]


@pytest.mark.parametrize("name", ["main", "billing"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_bind_is_chosen_by_the_name_of_its_database(site: Site, name: str, end: str) -> None:
    site.install("main", "billing")

    def work() -> None:
        site.db.session.add_all([model(id=1) for model in site.models.values()])
        site.db.session.flush()
        site.send("a", outbox_database=name)
        getattr(site.db.session, end)()

    site.request(work)
    found = {each: tasks(engine) for each, engine in site.engines.items()}
    assert found == {"main": [], "billing": []} | ({name: ["a"]} if end == "commit" else {})


def test_a_session_with_binds_to_two_databases_must_be_told(site: Site) -> None:
    site.install("main", "billing")

    def work() -> None:
        site.db.session.add_all([model(id=1) for model in site.models.values()])
        site.db.session.flush()
        with pytest.raises(TransactionError, match=r"'main'.*'billing'|'billing'.*'main'"):
            site.send("a")
        site.db.session.commit()

    site.request(work)
    assert [tasks(engine) for engine in site.engines.values()] == [[], []]


def test_a_bind_alone_may_hold_the_outbox(site: Site) -> None:
    site.install("billing")

    def work() -> None:
        site.db.session.add(site.models["billing"](id=1))
        site.db.session.flush()
        site.send("a")
        site.db.session.commit()

    site.request(work)
    assert (orders(site.engines["billing"]), tasks(site.engines["billing"])) == ([1], ["a"])


@pytest.mark.parametrize("proxied", [True, False])
def test_flasks_session_may_be_named_by_using(site: Site, proxied: bool) -> None:
    outbox = site.install("main")

    def work() -> None:
        subject = site.db.session if proxied else site.db.session()
        with outbox.using(subject):
            site.send("a")
        site.db.session.add(site.models["main"](id=1))
        site.db.session.commit()

    site.request(work)
    assert (orders(site.engines["main"]), tasks(site.engines["main"])) == ([1], ["a"])
