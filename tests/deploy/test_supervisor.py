"""The program section of supervisord."""

import configparser
import shlex

from celery_outbox.relay.loop import STOP_SECONDS
from tests.deploy.conftest import DEPLOY, PROGRAM, assert_begins


def test_supervisord_outwaits_the_relays_and_always_starts_them_again() -> None:
    parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=(" ;",))
    parser.read(DEPLOY / "supervisor" / "celery-outbox.conf")
    section = parser["program:celery-outbox-relay"]
    assert int(section["stopwaitsecs"]) > STOP_SECONDS
    assert (section["autorestart"], section["stopsignal"]) == ("true", "TERM")
    ports = []
    for number in range(section.getint("numprocs")):
        number += section.getint("numprocs_start")
        command = shlex.split(section["command"] % {"process_num": number})
        assert command[0] == PROGRAM
        assert_begins(command[1:])
        ports.append(command[command.index("--metrics-port") + 1])
    assert len(set(ports)) == len(ports) == 2
