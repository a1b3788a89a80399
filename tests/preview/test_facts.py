"""Tests that every series queried exists in METRICS with the labels used."""

import re

from exporter.core.metrics import METRICS
from exporter.preview.history import LAST_WORK_METRIC, PrometheusInventory
from exporter.preview.prometheus import PrometheusClient, PrometheusSeries

NAME, LABEL = re.compile(r"gpu_efficiency_\w+"), re.compile(r"(?:by|on) \(([^)]*)\)")
MATCHED = re.compile(r'(\w+)!?="')
SCRAPED = {"cluster", "job", "instance"}
"""Labels that a scrape adds."""


class Listener(PrometheusClient):
    """A server without data that records its queries."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def instant_query(self, query: str, at: float) -> list[PrometheusSeries]:
        self.asked.append(f"{at} {query}")
        return []

    def range_query(self, query: str, start: float, end: float, step: float) -> list[PrometheusSeries]:
        self.asked.append(f"{start} {end} {step} {query}")
        return []


def test_what_is_asked_for_is_in_the_catalogue() -> None:
    listener = Listener()
    facts = PrometheusInventory(listener, 'cluster="a"')
    facts.load(0, 3600, 60)
    have = {metric.name: set(metric.labels) for metric in METRICS}
    queries = [*listener.asked, facts.per_holder(LAST_WORK_METRIC)]
    assert len(queries) == 9
    for query in queries:
        names = set(NAME.findall(query))
        assert names - have.keys() == set(), query
        wanted = {label.strip() for found in LABEL.findall(query) for label in found.split(",")}
        known = set().union(SCRAPED, *(have[name] for name in names))
        assert (wanted | set(MATCHED.findall(query))) - known == set(), query
        assert query.count('cluster="a"') == len(re.findall(r"\w\{", query))
