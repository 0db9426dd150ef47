"""`python -m tests.endurance`: run each course at full length, print what was seen."""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests import servers
from tests.endurance.courses import Finish, Ground, cut, whole

COURSES: Mapping[str, Callable[[Ground, int], Finish]] = {
    "whole": whole,
    "broker": partial(cut, what="broker"),
    "database": partial(cut, what="database"),
}


def main() -> None:
    """Run the courses that the command line names, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(COURSES)}")
    parser.add_argument("--messages", type=int, default=200_000, help="of the whole course")
    parser.add_argument("--cut", type=int, default=20_000, help="messages of each of the others")
    given = parser.parse_args()
    if unknown := set(given.names) - set(COURSES):
        parser.error(f"expected names of {', '.join(COURSES)}, got {', '.join(sorted(unknown))}")
    directory = Path(tempfile.mkdtemp(prefix="outbox-"))
    directory.chmod(0o711)  # PostgreSQL runs as another user
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        postgresql = servers.start_postgresql(directory / "postgresql")
        stack.callback(postgresql.stop)
        redis = servers.start_redis(directory / "redis")
        stack.callback(redis.stop)
        for name in given.names or COURSES:
            ground = Ground(
                postgresql_url=postgresql.create_database(),
                redis_url=redis.empty_database(),
                directory=directory,
            )
            finish = COURSES[name](ground, given.messages if name == "whole" else given.cut)
            print(name, *finish.lines(), sep="\n  ")


if __name__ == "__main__":
    main()
