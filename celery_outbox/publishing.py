"""What a relay asks of a publisher, and the answer that it gets."""

from __future__ import annotations

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
        answered = [*self.accepted, *self.deferred, *self.errors, *self.unsent]
        known = {message.id for message in messages}
        undelayed = {message.id for message in messages if message.due_in is None}
        problems = {
            "ids that are not in the batch": set(answered) - known,
            "ids named more than once": {each for each in known if answered.count(each) > 1},
            "ids of which nothing is said": known - set(answered),
            "ids deferred that have no delay": undelayed & self.deferred,
        }
        found = [f"{what} {sorted(ids)}" for what, ids in problems.items() if ids]
        if found:
            raise PublisherContractError(
                f"expected a publisher to answer once for each message, found {'; '.join(found)}. "
                "Correct the publisher; nothing was deleted."
            )


class Publisher(Protocol):
    """Publishes batches over one connection to one broker; used by one thread at a time."""

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

    def close(self) -> None:
        """Let go of the connection; never raises."""
