"""Signed messages: the relay has no key, and what the producer signed is what the worker checks."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import kombu.pools
import pytest
import sqlalchemy as sa
from celery import Celery
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from celery_outbox import Outbox
from tests.end_to_end.conftest import BARE
from tests.relay.apps import relay_once, rows
from tests.relay.commands import ROOT, program, running
from tests.relay.wire import body_of, redis_envelopes
from tests.servers import RedisServer


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A directory with a private key and its certificate."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shop")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "certificate.pem").write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
    )
    (tmp_path / "keys" / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return tmp_path / "keys"


def test_a_worker_accepts_what_was_signed_and_relayed(
    keys: Path, redis_server: RedisServer, postgresql_url: str, tmp_path: Path
) -> None:
    broker, results = redis_server.empty_database(), redis_server.empty_database()
    engine = sa.create_engine(postgresql_url)
    app = Celery("shop", broker=broker, backend=results, set_as_current=False)
    outbox = Outbox(app, databases={"default": engine})
    outbox.install()
    env = {
        **os.environ,
        "SHOP_BROKER": broker,
        "SHOP_RESULTS": results,
        "SHOP_RUNS": str(tmp_path / "runs"),
        "SHOP_KEYS": str(keys),
    }
    code = "import sys; from tests.end_to_end.signing import store; print(store(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, postgresql_url],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (row,) = rows(outbox)
    relay_once(outbox)
    (envelope,) = redis_envelopes(broker)
    assert (envelope["content-type"], body_of(envelope)) == ("application/data", bytes(row.body))
    command = [program("celery"), "-A", "tests.end_to_end.signing", "worker", "-P", "solo", *BARE]
    with running(command, tmp_path, env):
        assert app.AsyncResult(done.stdout.strip()).get(timeout=30) == 5
    app.close()
    engine.dispose()
    kombu.pools.reset()
