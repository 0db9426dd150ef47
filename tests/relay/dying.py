"""A producer that dies right after a commit, and in the next transaction right before one.

Run as ``python -m tests.relay.dying DATABASE_URL BROKER_URL exit|kill``; prints the two task ids.
"""

import os
import signal
import sys

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.relay.apps import make_outbox, send


def main(database: str, broker: str, how: str) -> None:
    """Store one task and commit, store another, print both ids and die."""
    engine = sa.create_engine(database)
    outbox = make_outbox(broker, engine)
    with Session(engine) as session, session.begin():
        session.execute(sa.text("INSERT INTO orders VALUES (1)"))
        committed = send(outbox)
    session = Session(engine)
    session.begin()
    session.execute(sa.text("INSERT INTO orders VALUES (2)"))
    uncommitted = send(outbox)
    session.flush()
    print(committed, uncommitted, flush=True)
    if how == "exit":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
