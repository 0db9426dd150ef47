"""From ``apply_async`` to a row, in the caller's own transaction."""
