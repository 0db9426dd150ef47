"""A relay whose connections are cut at each request that it makes and each reply that it gets."""

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


class Cutter(TcpProxy):
    """Cuts every connection instead of forwarding the n-th thing that comes by, of one direction.

    Of ``requests``: the client has sent it, the server never gets it. Of ``replies``: the server has
    done what was asked, and the client never learns it.
    """

    def __init__(self, host: str, port: int, what: str, number: int) -> None:
        self._counting = threading.Lock()
        self._counts_replies = what == "replies"
        self._left = number
        super().__init__(host, port)

    @property
    def has_cut(self) -> bool:
        """Whether there were so many of them."""
        return self._left <= 0

    def spend(self, size: int, *, is_reply: bool) -> int:
        """Let nothing pass of the one whose turn it is."""
        if is_reply == self._counts_replies:
            with self._counting:
                self._left -= 1
                if self._left == 0:
                    return 0
        return super().spend(size, is_reply=is_reply)


def cut(place: Place, wire: str, what: str, number: int) -> tuple[Count, bool]:
    """Cut at one of the ``requests`` or ``replies`` on the wire to the ``broker`` or the ``database``.

    Returns what came of it, and whether there were as many at all.
    """
    place.stored.clear()
    place.store(STORED)
    url = place.broker if wire == "broker" else place.database
    with closing(Cutter(HOST, urlsplit(url).port or 0, what, number)) as proxy:
        way = {wire: proxy.through(url)}
        with place.relaying("--batch", str(SMALL), **way) as relay:
            trouble = place.finish(relay)
        has_cut = proxy.has_cut
    return Arrivals(place=place).count(SMALL * THREADS, trouble), has_cut


def cut_at_each(place: Place, wire: str, what: str, first: int = 1) -> Count:
    """Cut at the ``first``, at the next and so on, until the relay gets through.

    Returns all runs added up; the duplicates are those of the worst, and what is allowed is that of a
    single run.
    """
    total = Count()
    for number in itertools.count(first):
        count, has_cut = cut(place, wire, what, number)
        total = total.and_worst_of(count)
        if not has_cut or not count.is_right:
            break
    return total


def cuts_of(total: Count) -> int:
    """How many cuts there were: in all runs but the last."""
    return total.stored // STORED - 1
