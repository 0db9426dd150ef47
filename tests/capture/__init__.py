"""Which transaction a dispatch finds, and when its message is written."""
