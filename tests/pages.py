"""The Python of README.md and docs/, with servers that a test has in place of those that are named."""

import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))

SERVERS = {
    "postgresql+psycopg://localhost/shop": "sqlite:///{0}/shop.db",
    "postgresql+psycopg://localhost/billing": "sqlite:///{0}/billing.db",
    "postgresql+asyncpg://localhost/shop": "sqlite+aiosqlite:///{0}/shop.db",
    "redis://localhost/0": "sqla+sqlite:///{0}/broker.db",
    "redis://localhost/1": "cache+memory://",
}


def blocks(
    page: Path, directory: Path, language: str = "python", servers: Mapping[str, str] = SERVERS
) -> list[str]:
    """The code of a page in one language, with databases and brokers in the directory."""
    text = page.read_text()
    for server, ours in servers.items():
        text = text.replace(server, ours.format(directory))
    assert "localhost" not in text
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
