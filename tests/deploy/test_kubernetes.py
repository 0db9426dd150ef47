"""The manifests of Kubernetes: what their probes, their grace period and their arguments say."""

from typing import Any

import pytest
import yaml

from celery_outbox.relay.loop import STOP_SECONDS
from tests.deploy.conftest import APP, DEPLOY, assert_begins

FILES = ["relay.yaml", "schema.yaml"]


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file, by their kinds."""
    read = yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
    return {each["kind"]: each for each in read}


def pod(name: str) -> dict[str, Any]:
    (template,) = (
        each["spec"]["template"] for each in documents(name).values() if "template" in each["spec"]
    )
    found: dict[str, Any] = template["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["containers"]
    assert isinstance(found, dict)
    return found


def option(name: str) -> str:
    arguments: list[str] = container("relay.yaml")["args"]
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("name", FILES)
def test_the_command_understands_the_arguments_of_a_container(name: str) -> None:
    found = container(name)
    assert "command" not in found, "the entry point of the image is to stay process 1"
    assert all(isinstance(each, str) for each in found["args"])
    assert_begins(["-A", APP, *found["args"]])


def test_the_grace_period_is_longer_than_the_relay_takes_to_stop() -> None:
    assert pod("relay.yaml")["terminationGracePeriodSeconds"] > STOP_SECONDS


@pytest.mark.parametrize(
    ("probe", "path"),
    [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")],
)
def test_a_probe_asks_at_the_port_of_the_metrics(probe: str, path: str) -> None:
    found = container("relay.yaml")
    asked = found[probe]["httpGet"]
    ports = {each["name"]: each["containerPort"] for each in found["ports"]}
    assert (asked["path"], str(ports[asked["port"]])) == (path, option("--metrics-port"))
    assert option("--metrics-host") == "0.0.0.0"


def test_prometheus_is_sent_to_the_port_of_the_metrics() -> None:
    metadata = documents("relay.yaml")["Deployment"]["spec"]["template"]["metadata"]
    assert metadata["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": option("--metrics-port"),
        "prometheus.io/path": "/metrics",
    }


def test_the_share_of_the_memory_is_one_of_a_limit() -> None:
    assert option("--memory").endswith("%")
    assert container("relay.yaml")["resources"]["limits"]["memory"]


def test_the_disruption_budget_is_for_these_pods_and_lets_one_go() -> None:
    found = documents("relay.yaml")
    deployment, budget = found["Deployment"]["spec"], found["PodDisruptionBudget"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert budget["selector"] == deployment["selector"] == {"matchLabels": labels}
    assert budget["maxUnavailable"] == 1


@pytest.mark.parametrize("name", FILES)
def test_a_container_is_no_root_and_can_write_nowhere(name: str) -> None:
    assert pod(name)["securityContext"]["runAsNonRoot"] is True
    rights = container(name)["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}


def test_secrets_are_no_part_of_the_manifests() -> None:
    for name in FILES:
        assert container(name)["envFrom"] == [{"secretRef": {"name": "shop-outbox"}}]
        assert "env" not in container(name)
