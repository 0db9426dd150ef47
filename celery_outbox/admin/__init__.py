"""What an operator does with stored messages, in one database or several; nothing is printed here.

What acts on messages by their ids is decided by one conditional statement each: a relay that was
faster wins. Large amounts go in small batches, each in a short transaction of its own.
"""

from ..storage.desk import (
    EVERYTHING,
    FINISHED_STATES,
    FORGETTABLE_STATES,
    STATES,
    Filter,
    StoredMessage,
)
from .acting import Outcome, Outcomes, forget, reschedule, retry, unforgettable
from .chords import chord_warnings
from .looking import Listing, Plan, Whereabouts, find, list_messages, place
from .one import find_one, forget_one, reschedule_one
from .reaching import PATIENCE, Reach
from .sweeping import Doomed, Progress, doomed, forget_all, prune, retry_all

__all__ = [
    "EVERYTHING",
    "FINISHED_STATES",
    "FORGETTABLE_STATES",
    "PATIENCE",
    "STATES",
    "Doomed",
    "Filter",
    "Listing",
    "Outcome",
    "Outcomes",
    "Plan",
    "Progress",
    "Reach",
    "StoredMessage",
    "Whereabouts",
    "chord_warnings",
    "doomed",
    "find",
    "find_one",
    "forget",
    "forget_all",
    "forget_one",
    "list_messages",
    "place",
    "prune",
    "reschedule",
    "reschedule_one",
    "retry",
    "retry_all",
    "unforgettable",
]
