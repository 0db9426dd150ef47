"""Run as a program: migrate, and be killed at a point that the arguments name.

Arguments: the database's URL, the step, and ``before``, ``after`` or ``within`` it.
"""

import os
import signal
import sys
from dataclasses import replace

import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.migrate import Migration, Progress, Step, migrate
from tests.schema.old import STEPS


def deadly(step: Step, when: str) -> Step:
    """The step, but this process is killed before or after it, or when it reports progress."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def run(database: Database, connection: sa.Connection, progress: Progress) -> None:
        if when == "before":
            die()

        def report(name: str, done: int, total: int) -> None:
            if when == "within" and done:
                die()
            progress(name, done, total)

        step.run(database, connection, report)
        die()

    return replace(step, run=run)


def main(url: str, name: str, when: str) -> None:
    steps = [deadly(step, when) if step.name == name else step for step in STEPS]
    database = Database("default", sa.make_url(url), "celery_outbox")
    migrate(database, migrations=[Migration(source=0, steps=steps)])


if __name__ == "__main__":
    main(*sys.argv[1:])
