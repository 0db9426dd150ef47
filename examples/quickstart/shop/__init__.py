"""A small shop that takes orders, and has a Celery worker write their receipts."""
