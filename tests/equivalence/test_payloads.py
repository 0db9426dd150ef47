"""What a task is given: the bytes that arrive are those that plain Celery sends."""

from typing import Any

import pytest

from tests.equivalence.conftest import DATABASES
from tests.equivalence.pairs import Pair

MIB = 1024 * 1024

PAYLOADS: dict[str, tuple[Any, str]] = {
    "NUL": ("a\0b", "json"),
    "lone surrogates": ("\ud800 and \udfff", "json"),
    "every plane": ("é ह 漢 \U0001f600", "json"),
    "not a number": ([float("nan"), float("inf"), float("-inf")], "json"),
    "5 MiB": ("é" + "x" * (5 * MIB), "json"),
    "bytes": (b"\xff\x00\x80", "json"),
    "pickle": ({b"\xff\x00": {1, 2}, "\0": float("nan")}, "pickle"),
    "msgpack": ({"k": b"\xff\x00" * 1000}, "msgpack"),
    "yaml": ({"k": ["é", 1.5, None]}, "yaml"),
}


@pytest.mark.parametrize(
    "every_pair", [("redis", each) for each in DATABASES], indirect=True, ids=DATABASES
)
@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("name", PAYLOADS)
def test_every_byte_of_a_payload_is_the_same_after_the_trip(
    name: str, compression: str | None, every_pair: Pair
) -> None:
    value, serializer = PAYLOADS[name]
    every_pair.apply(value, 0, serializer=serializer, compression=compression)
