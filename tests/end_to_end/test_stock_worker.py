"""A worker without the package: it runs what was stored like anything else."""

from celery import Celery, chain, chord, group, signature

from celery_outbox import Outbox
from tests.end_to_end.conftest import Works
from tests.relay.apps import relay_once, rows
from tests.waiting import wait_until


def test_the_worker_has_no_outbox(stock_works: Works) -> None:
    loaded = stock_works.send("loaded_modules", via_outbox=True)
    stock_works.relay()
    assert [name for name in loaded.get(timeout=20) if name.startswith("celery_outbox")] == []


def test_a_chord_runs_whole(stock_works: Works) -> None:
    app = stock_works.app
    header = group(signature("shop.add", (number, 1), app=app) for number in range(3))
    result = chord(header, app=app)(signature("shop.total", app=app), via_outbox=True)
    stock_works.relay()
    assert result.get(timeout=20) == 6


def test_a_chain_and_its_links_run_whole(stock_works: Works) -> None:
    app = stock_works.app
    steps = [signature("shop.add", (1, 2), app=app), signature("shop.add", (10,), app=app)]
    result = chain(*steps, app=app).apply_async(via_outbox=True)
    stock_works.relay()
    assert result.get(timeout=20) == 13
    link = signature("shop.note", ("linked",), immutable=True, app=app)
    stock_works.send("add", 3, 4, via_outbox=True, link=link)
    stock_works.relay()
    wait_until(lambda: stock_works.runs("linked") == ["linked"], 20, "the link")


def test_a_later_step_that_chooses_the_outbox_is_sent_directly_by_such_a_worker(
    stock_works: Works,
) -> None:
    app = stock_works.app
    later = signature("shop.add", (100,), app=app).set(via_outbox=True)
    result = (signature("shop.add", (1, 2), app=app) | later).apply_async(via_outbox=True)
    stock_works.relay()
    assert result.get(timeout=20) == 103
    assert rows(stock_works.outbox) == []


def test_an_expired_task_is_revoked_by_its_worker(stock_works: Works) -> None:
    result = stock_works.send("note", "too late", via_outbox=True, expires=0.001)
    stock_works.relay()
    stock_works.catch_up()
    assert stock_works.runs("too late") == []
    assert result.state == "REVOKED"


def test_a_delayed_task_runs_when_it_is_due(stock_works: Works) -> None:
    result = stock_works.send("note", "patient", via_outbox=True, countdown=1)
    stock_works.relay()
    stock_works.catch_up()
    assert result.get(timeout=20) == "patient"
    assert stock_works.runs("patient") == ["patient"]


def test_messages_of_protocol_1_run_with_their_links_and_chains(stock_works: Works) -> None:
    # Celery makes messages as it was set up at the first one.
    app = Celery("shop", set_as_current=False)
    same = {key: stock_works.app.conf[key] for key in ("broker_url", "result_backend")}
    app.conf.update(same, task_protocol=1)
    outbox = Outbox(app, databases=stock_works.outbox.settings.databases)
    link = signature("shop.note", ("linked in protocol 1",), immutable=True, app=app)
    steps = [signature("shop.add", (1, 2), app=app), signature("shop.add", (10,), app=app)]
    single = app.send_task("shop.add", (3, 4), task_id="first", via_outbox=True, link=link)
    chained = chain(*steps, app=app).apply_async(via_outbox=True)
    assert all(b'"task": "shop.add"' in row.body for row in rows(outbox))
    relay_once(outbox)
    assert (single.get(timeout=20), chained.get(timeout=20)) == (7, 13)
    linked = ["linked in protocol 1"]
    wait_until(lambda: stock_works.runs(linked[0]) == linked, 20, "the link")
    app.close()
