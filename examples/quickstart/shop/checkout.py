"""The process that takes orders. It stands for your web application."""

import os
import signal

from .celery import outbox
from .models import Base, Order, Session, engine
from .tasks import send_receipt


class PaymentDeclinedError(Exception):
    pass


def pay(customer):
    if customer == "Bob":
        raise PaymentDeclinedError


def checkout(customer, item):
    with Session.begin() as session:
        order = Order(customer=customer, item=item)
        session.add(order)
        session.flush()  # the order gets its id
        # Stored in this transaction, found by itself: no broker is contacted here.
        result = send_receipt.apply_async((order.id,), via_outbox=True)
        print(f"order of {customer}, with task {result.id}")
        pay(customer)
    print("committed", flush=True)


def main():
    Base.metadata.create_all(engine)
    outbox.install()  # creates the outbox table beside yours; again changes nothing

    try:
        checkout("Bob", "coffee")
    except PaymentDeclinedError:
        print("payment declined, rolled back", flush=True)
    checkout("Ada", "tea")

    os.kill(os.getpid(), signal.SIGKILL)  # kill -9: the worst moment to lose a process


if __name__ == "__main__":
    main()
