"""The readable form of arguments in a message's headers is Celery's own."""

from typing import Any

import pytest
from celery.utils.saferepr import saferepr
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_outbox.capture.reprs import represent

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.decimals()
    | st.text(max_size=30)
    | st.sampled_from(["it's a test", "a b c d e"])
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids()
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=25,
)


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(value=values, maxlen=st.integers(1, 150), maxlevels=st.integers(1, 6))
@example(value={"note": "x" * 2000}, maxlen=1024, maxlevels=3)
@example(value=([[["deep"]]],), maxlen=1024, maxlevels=3)
def test_it_is_celerys_for_what_json_tasks_use(value: Any, maxlen: int, maxlevels: int) -> None:
    assert represent(value, maxlen, maxlevels) == saferepr(value, maxlen, maxlevels=maxlevels)


class Text(str):
    """Celery writes it by its own rules for texts."""


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"bytes", Text("text"), CYCLE, {(1, 2): 3}],
    ids=lambda value: type(value).__name__,
)
def test_what_it_does_not_know_is_left_to_celery(value: Any) -> None:
    assert represent([value], 1024, 3) is None


@pytest.mark.parametrize(("maxlen", "maxlevels"), [(None, 3), (0, 3), (1024, None), (1024, 0)])
def test_limits_that_are_none_are_left_to_celery(maxlen: int | None, maxlevels: int | None) -> None:
    assert represent([1], maxlen, maxlevels) is None
