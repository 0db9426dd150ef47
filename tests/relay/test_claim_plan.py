"""How MariaDB finds what a relay claims: by the index, in its order, whatever else is in the table."""

from typing import Any

import pytest
import sqlalchemy as sa

from tests.benchmarks.filling import Pattern, fill
from tests.relay.apps import relay_once
from tests.relay.conftest import OpenOutbox
from tests.storage.rows import BROKER, add, make_message


@pytest.mark.parametrize("aside", [0, 2500])
def test_no_statement_of_a_claim_sorts_its_rows(
    aside: int, open_outbox: OpenOutbox, mariadb_url: str, redis_url: str
) -> None:
    outbox = open_outbox(redis_url, mariadb_url)
    database, engine = outbox.databases["default"], outbox.settings.databases["default"]
    assert isinstance(engine, sa.Engine)
    pattern = Pattern(broker=BROKER, message="x", body=b"x")
    fill(database, pattern, ready=5000 - 2 * aside, delayed=aside, finished=aside)
    add(database, make_message())
    with engine.connect() as connection:
        connection.exec_driver_sql("ANALYZE TABLE celery_outbox")
    asked: list[tuple[str, Any]] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if "ORDER BY" in statement:
            asked.append((statement, parameters))

    relay_once(outbox)
    claiming, asked = asked, []
    assert len(claiming) >= 2  # a look, and a claim
    with engine.connect() as connection:
        for statement, parameters in claiming:
            plan = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).mappings().all()
            assert [each["key"] for each in plan] == ["ix_celery_outbox_claim"], statement
            assert "filesort" not in str([each["Extra"] for each in plan]), statement
