"""From a row to the broker: claim, publish, settle."""
