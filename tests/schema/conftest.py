"""Databases that have no table yet."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    """An engine of a database that has no table yet."""
    engine = sa.create_engine(database_url)
    yield engine
    engine.dispose()
