"""A relay whose connections are cut at each of the replies that it gets, one run for each."""

import itertools
import threading
from contextlib import closing
from urllib.parse import urlsplit

from tests.crash.boundaries import SMALL, THREADS
from tests.crash.places import Arrivals, Count, Place
from tests.processes import HOST
from tests.proxy import TcpProxy

#: Messages of a run: some batches.
STORED = 3 * SMALL


class ReplyCutter(TcpProxy):
    """Cuts every connection instead of forwarding the n-th reply.

    The server has done what was asked, and the client never learns it.
    """

    def __init__(self, host: str, port: int, number: int) -> None:
        self._counting = threading.Lock()
        self._left = number
        super().__init__(host, port)

    @property
    def has_cut(self) -> bool:
        """Whether there were so many replies."""
        return self._left <= 0

    def spend(self, size: int, *, is_reply: bool) -> int:
        """Let nothing pass of the reply whose turn it is."""
        if is_reply:
            with self._counting:
                self._left -= 1
                if self._left == 0:
                    return 0
        return super().spend(size, is_reply=is_reply)


def cut(place: Place, wire: str, number: int) -> tuple[Count, bool]:
    """Cut at one reply, on the wire to the ``broker`` or to the ``database``.

    Returns what came of it, and whether the relay got as many replies at all.
    """
    place.stored.clear()
    place.store(STORED)
    url = place.broker if wire == "broker" else place.database
    with closing(ReplyCutter(HOST, urlsplit(url).port or 0, number)) as proxy:
        way = {wire: proxy.through(url)}
        with place.relaying("--batch", str(SMALL), **way) as relay:
            trouble = place.finish(relay)
        has_cut = proxy.has_cut
    return Arrivals(place=place).count(SMALL * THREADS, trouble), has_cut


def cut_at_every_reply(place: Place, wire: str) -> tuple[int, Count]:
    """Cut at the first reply, at the second and so on, until the relay gets through.

    Returns how many cuts there were, and all runs added up; the duplicates are those of the worst, and
    what is allowed is that of a single run.
    """
    total = Count()
    for number in itertools.count(1):
        count, has_cut = cut(place, wire, number)
        total = total.and_worst_of(count)
        if not has_cut or not count.is_right:
            return number - (not has_cut), total
    raise AssertionError("unreachable")
