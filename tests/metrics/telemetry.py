"""What an OpenTelemetry reader has got."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

#: Of one number: the labels and the value of each series.
Points = list[tuple[Mapping[str, Any], Any]]


def points(reader: InMemoryMetricReader) -> Mapping[str, Points]:
    """Collect the numbers, by their names."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: [(dict(each.attributes or {}), each) for each in metric.data.data_points]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
