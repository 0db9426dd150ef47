"""Connections and engines in every form: which are the configured database, and what they store."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from celery_outbox.errors import TransactionError
from tests.capture.shop import (
    FurnishedEngine,
    MakeEngine,
    OpenShop,
    OutOfStockError,
    Shop,
    insert_order,
)


@contextmanager
def engine_begin(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.begin() as connection:
        yield connection


@contextmanager
def connect_and_commit(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect() as connection:
        insert_order(connection, 0)
        yield connection
        connection.commit()


@contextmanager
def connect_and_begin(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def transaction_by_hand(engine: sa.Engine) -> Iterator[sa.Connection]:
    connection = engine.connect()
    transaction = connection.begin()
    try:
        yield connection
        transaction.commit()
    finally:
        connection.close()


Way = Callable[[sa.Engine], AbstractContextManager[sa.Connection]]
every_way = pytest.mark.parametrize(
    "way",
    [engine_begin, connect_and_commit, connect_and_begin, transaction_by_hand],
    ids=lambda way: way.__name__,
)


@every_way
def test_commit_stores_the_task_with_the_order(shop: Shop, way: Way) -> None:
    with way(shop.engine) as connection:
        insert_order(connection, 1)
        shop.send("a")
    assert (shop.orders[-1], shop.tasks) == (1, ["a"])


@every_way
def test_an_exception_leaves_neither_task_nor_order(shop: Shop, way: Way) -> None:
    with pytest.raises(OutOfStockError), way(shop.engine) as connection:
        insert_order(connection, 1)
        shop.send("a")
        raise OutOfStockError
    assert (shop.orders, shop.tasks) == ([], [])


def test_a_connection_reused_after_rollback_stores_only_what_came_after(shop: Shop) -> None:
    with shop.engine.connect() as connection:
        for number, end in enumerate([connection.rollback, connection.commit, connection.commit]):
            shop.order_and_send(begun(connection), number)
            end()
        connection.begin()
        connection.commit()
    assert (shop.orders, shop.tasks) == ([1, 2], ["1", "2"])


def test_a_connection_closed_without_commit_stores_nothing(shop: Shop) -> None:
    with shop.engine.connect() as connection:
        shop.order_and_send(begun(connection), 1)
    assert (shop.orders, shop.tasks) == ([], [])


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
@pytest.mark.parametrize("prepares", [True, False])
@pytest.mark.parametrize("commits", [True, False])
def test_a_two_phase_connection_commits_or_rolls_back_task_and_order(
    furnished_engine: FurnishedEngine,
    open_shop: OpenShop,
    server: str,
    prepares: bool,
    commits: bool,
) -> None:
    shop = open_shop({"default": furnished_engine(server)})
    with shop.engine.connect() as connection:
        transaction = connection.begin_twophase()
        shop.order_and_send(connection, 1)
        if prepares:
            transaction.prepare()
        (transaction.commit if commits else transaction.rollback)()
        with connection.begin():
            shop.order_and_send(connection, 2)
    assert (shop.orders, shop.tasks) == (([1, 2], ["1", "2"]) if commits else ([2], ["2"]))


def with_options(engine: sa.Engine, make_engine: MakeEngine) -> sa.Engine:
    return engine.execution_options(logging_token="variant")


def with_options_twice(engine: sa.Engine, make_engine: MakeEngine) -> sa.Engine:
    return engine.execution_options(compiled_cache=None).execution_options(logging_token="twice")


def at_another_level(engine: sa.Engine, make_engine: MakeEngine) -> sa.Engine:
    return engine.execution_options(isolation_level="SERIALIZABLE")


def another_engine(engine: sa.Engine, make_engine: MakeEngine) -> sa.Engine:
    return make_engine(engine.url)


def without_pool(engine: sa.Engine, make_engine: MakeEngine) -> sa.Engine:
    return make_engine(engine.url, poolclass=sa.NullPool)


def other_query(engine: sa.Engine, make_engine: MakeEngine) -> sa.Engine:
    queries = {
        "postgresql": {"application_name": "x"},
        "mysql": {"charset": "utf8mb4", "connect_timeout": "5"},
    }
    return make_engine(engine.url.set(query=queries.get(engine.name, {"timeout": "7"})))


def other_dialect_name(engine: sa.Engine, make_engine: MakeEngine) -> sa.Engine:
    names = {
        "postgresql": "postgresql+psycopg",
        "mysql": "mariadb+pymysql",
        "sqlite": "sqlite+pysqlite",
    }
    return make_engine(engine.url.set(drivername=names[engine.name]))


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize(
    "variant",
    [
        with_options,
        with_options_twice,
        at_another_level,
        another_engine,
        without_pool,
        other_query,
        other_dialect_name,
    ],
    ids=lambda variant: variant.__name__,
)
def test_a_variant_of_the_configured_engine_is_that_database(
    shop: Shop,
    make_engine: MakeEngine,
    variant: Callable[[sa.Engine, MakeEngine], sa.Engine],
    commits: bool,
) -> None:
    engine = variant(shop.engine, make_engine)
    with Session(engine) as session:
        shop.order_and_send(session, 1)
        (session.commit if commits else session.rollback)()
    with engine.connect() as connection:
        shop.order_and_send(begun(connection), 2)
        (connection.commit if commits else connection.rollback)()
    assert (shop.orders, shop.tasks) == (([1, 2], ["1", "2"]) if commits else ([], []))


@pytest.mark.parametrize("commits", [True, False])
def test_a_database_configured_by_its_url_is_found(
    shop_engine: sa.Engine, open_shop: OpenShop, commits: bool
) -> None:
    url = shop_engine.url.render_as_string(hide_password=False)
    shop = open_shop({"default": shop_engine}, databases_as={"default": url})
    with Session(shop_engine) as session:
        shop.order_and_send(session, 1)
        (session.commit if commits else session.rollback)()
    assert (shop.orders, shop.tasks) == (([1], ["1"]) if commits else ([], []))


@pytest.mark.parametrize(
    ("server", "driver"),
    [
        ("sqlite", "sqlite+aiosqlite"),
        ("postgresql", "postgresql+asyncpg"),
        ("postgresql", "postgresql+psycopg_async"),
        ("mariadb", "mysql+aiomysql"),
    ],
)
def test_a_database_configured_with_an_asynchronous_driver_is_found_by_a_synchronous_session(
    furnished_engine: FurnishedEngine, open_shop: OpenShop, server: str, driver: str
) -> None:
    engine = furnished_engine(server)
    shop = open_shop(
        {"default": engine},
        databases_as={"default": create_async_engine(engine.url.set(drivername=driver))},
    )
    with Session(engine) as session:
        shop.order_and_send(session, 1)
        session.rollback()
        shop.order_and_send(session, 2)
        session.commit()
    assert (shop.orders, shop.tasks) == ([2], ["2"])


@pytest.mark.parametrize("form", ["relative", "dotted", "file-uri"])
def test_a_sqlite_file_is_the_same_however_its_path_is_written(
    sqlite_shop: Shop, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    path = Path(sqlite_shop.engine.url.database or "")
    monkeypatch.chdir(path.parent)
    urls = {
        "relative": f"sqlite:///{path.name}",
        "dotted": f"sqlite:///{path.parent}/../{path.parent.name}/{path.name}",
        "file-uri": f"sqlite:///file:{path}?uri=true",
    }
    with Session(make_engine(urls[form])) as session:
        sqlite_shop.order_and_send(session, 1)
        session.rollback()
        sqlite_shop.order_and_send(session, 2)
        session.commit()
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([2], ["2"])


def test_databases_in_memory_are_told_apart(make_engine: MakeEngine, open_shop: OpenShop) -> None:
    configured, stranger = (make_engine("sqlite://", poolclass=sa.StaticPool) for _ in range(2))
    shop = open_shop({"default": configured})
    with Session(configured) as session, session.begin():
        shop.send("a")
    with Session(stranger) as session, session.begin(), pytest.raises(TransactionError):
        shop.send("b")
    with configured.connect() as connection:
        found = connection.scalars(sa.text("SELECT task_id FROM celery_outbox")).all()
    assert found == ["a"]


@pytest.mark.parametrize("where", ["session", "connection"])
def test_a_schema_translate_map_of_the_caller_does_not_move_the_outbox_table(
    postgresql_url: str, make_engine: MakeEngine, open_shop: OpenShop, where: str
) -> None:
    shop = open_shop({"default": make_engine(postgresql_url)})
    with shop.engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA tenant"))
        connection.execute(sa.text("CREATE TABLE tenant.orders (id int primary key, note text)"))
    tenant = shop.engine.execution_options(schema_translate_map={None: "tenant"})
    opened = Session(tenant) if where == "session" else tenant.connect()
    with opened as transaction, transaction.begin():
        shop.order_and_send(transaction, 1)
    with shop.engine.connect() as connection:
        found = connection.scalars(sa.text("SELECT id FROM tenant.orders")).all()
    assert (found, shop.orders, shop.tasks) == ([1], [], ["1"])


def begun(connection: sa.Connection) -> sa.Connection:
    if not connection.in_transaction():
        connection.begin()
    return connection
