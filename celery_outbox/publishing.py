"""What a relay asks of a publisher, and the answer that it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from .errors import PublisherContractError
from .message import ClaimedMessage

__all__ = ["Outcome", "Publisher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of each message of a batch; the ids are those of the rows.

    Attributes:
        accepted: the broker has taken them for certain.
        deferred: to be offered again at their intended time; only messages with a delay.
        errors: not accepted, or unknown whether; with the reason.
        unsent: certainly not sent, and nothing of the message was the cause: the connection broke
            before, or the time was up.
        is_connection_lost: the broker could not be reached any more.
    """

    accepted: Set[int] = frozenset()
    deferred: Set[int] = frozenset()
    errors: Mapping[int, str] = field(default_factory=dict)
    unsent: Set[int] = frozenset()
    is_connection_lost: bool = False

    def check(self, messages: Sequence[ClaimedMessage]) -> None:
        """Raise PublisherContractError unless each message of the batch appears exactly once."""
        found = [f"{what} {sorted(ids)}" for what, ids in self._problems(messages).items() if ids]
        if found:
            raise PublisherContractError(
                f"expected a publisher to answer once for each message, found {'; '.join(found)}. "
                "Correct the publisher; only what it has accepted without contradiction counts."
            )

    def without_contradictions(self, messages: Sequence[ClaimedMessage], reason: str) -> Outcome:
        """What of an answer that breaks the contract still counts; the rest are errors."""
        wrong = set().union(*self._problems(messages).values())
        known = {message.id for message in messages}
        kept = {
            name: (set(getattr(self, name)) & known) - wrong
            for name in ("accepted", "deferred", "unsent")
        }
        errors = {row: text for row, text in self.errors.items() if row in known - wrong}
        errors |= dict.fromkeys(wrong & known, reason)
        return Outcome(**kept, errors=errors, is_connection_lost=self.is_connection_lost)

    def _problems(self, messages: Sequence[ClaimedMessage]) -> Mapping[str, Set[int]]:
        answered = Counter([*self.accepted, *self.deferred, *self.errors, *self.unsent])
        known = {message.id for message in messages}
        undelayed = {message.id for message in messages if message.due_in is None}
        return {
            "ids that are not in the batch": answered.keys() - known,
            "ids named more than once": {each for each in known if answered[each] > 1},
            "ids of which nothing is said": known - answered.keys(),
            "ids deferred that have no delay": undelayed & set(self.deferred),
        }


class Publisher(Protocol):
    """Publishes batches over one connection to one broker; used by one thread at a time.

    Derive from it: what has a default here is then inherited.
    """

    @property
    def is_connected(self) -> bool:
        """Whether the connection is believed to stand."""

    def connect(self) -> None:
        """Connect, or raise what the transport raises; called before anything is claimed."""

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        """Publish a batch and say what became of each message.

        Args:
            messages: in the order in which they fell due.
            deadline: ``time.monotonic()`` value after which no message may be sent any more.
            read_at: ``time.monotonic()`` value from which the messages' times count.

        KeyboardInterrupt and SystemExit pass through. Any other exception counts as: the outcome of
        the whole batch is unknown.
        """

    def line_of(self, message: ClaimedMessage) -> str | None:
        """The line that a message must keep its place in, such as an SQS FIFO group; None for none.

        When one of a line could not be delivered, the relay offers the others only after it.
        """
        return None

    def longest(self, count: int) -> float | None:
        """How many seconds publishing ``count`` messages may take; None where nothing limits it."""
        return None

    def keep_alive(self) -> None:
        """Do what an idle connection needs; called every few seconds while there is nothing to do.

        Never raises; a connection that is found lost is closed.
        """

    def close(self) -> None:
        """Let go of the connection; never raises."""
