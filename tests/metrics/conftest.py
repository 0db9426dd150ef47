"""The Outboxes and databases that the tests of the relay have."""

from tests.relay.conftest import make_database, open_outbox

__all__ = ["make_database", "open_outbox"]
