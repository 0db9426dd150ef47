"""The page, the dashboard and the alert rules: they speak of metrics that there are, as they are."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from celery_outbox.metrics.catalogue import METRICS
from tests.metrics.scraping import named
from tests.pages import ROOT

DOCS = ROOT / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
LABELS = {each.prometheus: set(each.labels) for each in METRICS}


def expressions() -> dict[str, list[str]]:
    """The queries of each panel, and of the variables."""
    found = {
        panel["title"]: [target["expr"] for target in panel["targets"]] for panel in DASHBOARD["panels"]
    }
    variables = [each["definition"] for each in DASHBOARD["templating"]["list"] if "definition" in each]
    return found | {"variables": variables}


def promtool(directory: Path, *arguments: str) -> str:
    """Run promtool to its end and return what it says."""
    program = shutil.which("promtool")
    if program is None:
        # Debian's package is the whole of Prometheus, 100 MB: too much for a few checks.
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [program, *arguments], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_page_tells_of_each_metric_its_type_unit_and_labels() -> None:
    page = (DOCS / "metrics.md").read_text()
    table = re.findall(r"^\| `(celery_outbox_\w+)` \| (\w+) \| (\w*) ?\| (.*?) \|", page, re.MULTILINE)
    assert table == [
        (
            each.prometheus,
            each.kind,
            each.unit,
            ", ".join(f"`{label}`" for label in each.labels),
        )
        for each in METRICS
    ]


@pytest.mark.parametrize("panel", expressions())
def test_the_queries_of_a_panel_name_metrics_and_labels_that_there_are(panel: str) -> None:
    for expression in expressions()[panel]:
        names = named(expression)
        assert names
        assert names <= LABELS.keys()
        known = set.intersection(*(LABELS[each] for each in names)) | {"le"}
        used = set(re.findall(r"(\w+)=~?\"", expression))
        used |= {
            label.strip()
            for group in re.findall(r"by \(([^)]*)\)", expression)
            for label in group.split(",")
        }
        assert used - {"state"} <= known
        assert "state" not in used or "celery_outbox_backlog" in names


def test_the_dashboard_shows_every_metric() -> None:
    assert named(json.dumps(DASHBOARD["panels"])) == LABELS.keys()


def test_the_legends_of_the_dashboard_name_labels_that_the_queries_keep() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                (outermost, *_) = re.findall(r"by \(([^)]*)\)", target["expr"])
                assert label in outermost


def test_the_alerts_name_metrics_that_there_are() -> None:
    said = named(" ".join(rule["expr"] for rule in RULES))
    assert said
    assert said <= LABELS.keys()


def test_the_queries_of_the_dashboard_are_ones_that_prometheus_reads(tmp_path: Path) -> None:
    queries = [
        query.replace("$__rate_interval", "5m").replace("$", "")
        for title, every in expressions().items()
        for query in every
        if title != "variables"
    ]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool(tmp_path, "check", "rules", "panels.yml")


def test_the_alerts_are_rules_that_prometheus_reads() -> None:
    assert f"{len(RULES)} rules found" in promtool(DOCS, "check", "rules", "alerts.yml")


def test_the_alerts_tell_of_trouble_that_stays_and_of_nothing_else() -> None:
    assert "SUCCESS" in promtool(Path(__file__).parent, "test", "rules", "alerts.yml")
