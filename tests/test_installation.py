"""What a user gets who installs the package without extras."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent

#: Refuses the modules named in the arguments, then imports the package and the command.
IMPORT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

refused = set(sys.argv[1:])
sys.meta_path.insert(0, Refuse())
import celery_outbox.cli
"""


def dependencies() -> set[str]:
    """The distributions that pip installs with the package, as far as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    pending = [(Requirement(each), "") for each in project["dependencies"]]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement, of_extra = pending.pop()
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                found.add(name)
                requires = metadata.requires(name) or []
                pending += [(Requirement(each), extra) for each in requires]
    return found


def test_the_package_and_its_command_import_without_extras() -> None:
    wanted = dependencies()
    extra = [
        module
        for module, distributions in metadata.packages_distributions().items()
        if module != "celery_outbox"
        and not any(canonicalize_name(each) in wanted for each in distributions)
    ]
    assert "pytest" in extra
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *extra],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
