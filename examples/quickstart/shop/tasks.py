"""The tasks: ordinary Celery, the worker needs nothing from the outbox."""

from .celery import app
from .models import Order, Receipt, Session


@app.task(bind=True)
def send_receipt(self, order_id):
    """Write the receipt of an order.

    Delivery is at-least-once, so a task of yours should do no harm when it runs again. This one
    leaves a row each time, for the tour to count.
    """
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        text = f"{order.item} for {order.customer}"
        session.add(Receipt(order_id=order.id, task_id=self.request.id, text=text))
