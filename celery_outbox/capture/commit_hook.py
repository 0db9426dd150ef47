"""Running something right after the COMMIT of a Connection's transaction.

SQLAlchemy has an event before COMMIT and none after it. The transaction object is therefore given a
subclass of its own class, whose ``commit`` goes on afterwards; it lives as long as the transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.engine import Connection

__all__ = ["call_after_commit"]


def call_after_commit(
    connection: Connection, call: Callable[[], None], refused: Callable[[], object]
) -> None:
    """Call ``call`` once when the root transaction of ``connection`` has committed.

    Call ``refused`` instead when COMMIT fails, and neither after a rollback.
    """
    transaction: Any = connection.get_transaction()
    if transaction is None:
        return
    kind = type(transaction)

    def commit(self: Any) -> None:
        try:
            kind.commit(self)
        except BaseException:
            refused()
            raise
        call()

    # The object has slots, and no room for an attribute of ours.
    transaction.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "commit": commit})
