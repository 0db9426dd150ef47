"""The checks of celery_outbox; a package so that a test can import its neighbours by name."""
