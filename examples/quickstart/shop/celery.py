"""The Celery app, with an outbox in the business database."""

from celery import Celery

from celery_outbox import Outbox

from .models import engine

app = Celery("shop", broker="sqla+sqlite:///broker/broker.db", include=["shop.tasks"])

# With require_transaction a dispatch through the outbox outside a transaction is an error: in a web
# application it is nearly always a mistake.
outbox = Outbox(app, databases={"default": engine}, require_transaction=True)
