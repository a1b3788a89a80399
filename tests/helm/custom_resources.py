"""JSON schemas of the custom resources that the chart makes, which Kubernetes' own schemas lack.

Owns the fields that the chart sets or lets through, and no other: an unknown one is refused. Written from the API
references of the Prometheus Operator (monitoring.coreos.com/v1) and the Grafana Operator
(grafana.integreatly.org/v1beta1).
"""

from typing import Any

TEXT = {"type": "string"}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
FLAG = {"type": "boolean"}
DURATION = {"type": "string", "pattern": r"^(([0-9]+)(ms|s|m|h|d|w|y))+$"}
GO_DURATION = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$"}
COUNT = {"type": "integer", "minimum": 0}
LABELS = {"type": "object", "additionalProperties": TEXT}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": {name.rstrip("_"): schema for name, schema in properties.items()},
    }


def _list(items: dict[str, Any], *, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


KEY = _object("key", name=TEXT, key=TEXT, optional=FLAG)
FROM = _object(secret=KEY, configMap=KEY)
SELECTOR = _object(matchLabels=LABELS, matchExpressions=_list({"type": "object"}))
RELABELING = _object(
    sourceLabels=_list(TEXT), separator=TEXT, targetLabel=TEXT, regex=TEXT, modulus=COUNT, replacement=TEXT,
    action={"enum": ["replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep", "lowercase",
                     "uppercase", "keepequal", "dropequal"]},
)  # fmt: skip
TLS_VERSION = {"enum": ["TLS10", "TLS11", "TLS12", "TLS13"]}
TLS = _object(
    ca=FROM, cert=FROM, keySecret=KEY, serverName=TEXT, insecureSkipVerify=FLAG,
    minVersion=TLS_VERSION, maxVersion=TLS_VERSION,
)  # fmt: skip
ENDPOINT = _object(
    "port", port=TEXT, path=TEXT, scheme={"enum": ["http", "https"]}, honorLabels=FLAG, interval=DURATION,
    scrapeTimeout=DURATION, tlsConfig=TLS, basicAuth=_object("username", "password", username=KEY, password=KEY),
    relabelings=_list(RELABELING), metricRelabelings=_list(RELABELING),
)  # fmt: skip
_MONITOR = {
    "selector": SELECTOR,
    "namespaceSelector": _object(any=FLAG, matchNames=_list(TEXT)),
    "sampleLimit": COUNT,
    "labelLimit": COUNT,
}
RULE = {
    "oneOf": [
        _object("record", "expr", record=TEXT, expr=TEXT, labels=LABELS),
        _object(
            "alert", "expr", alert=TEXT, expr=TEXT, for_=DURATION, keep_firing_for=DURATION, labels=LABELS,
            annotations=LABELS,
        ),
    ]
}  # fmt: skip
GROUP = _object("name", name={"type": "string", "minLength": 1}, interval=DURATION, rules=_list(RULE, least=1))

SPECS = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _object(
        "selector", "podMetricsEndpoints", podMetricsEndpoints=_list(ENDPOINT, least=1), **_MONITOR
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _object(
        "selector", "endpoints", endpoints=_list(ENDPOINT, least=1), **_MONITOR
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(groups=_list(GROUP, least=1)),
    ("grafana.integreatly.org/v1beta1", "GrafanaDashboard"): _object(
        "instanceSelector", instanceSelector=SELECTOR, folder=TEXT, resyncPeriod=GO_DURATION,
        allowCrossNamespaceImport=FLAG, configMapRef=KEY,
    ),
}  # fmt: skip
METADATA = _object("name", "namespace", name=NAME, namespace=NAME, labels=LABELS, annotations=LABELS)


def schema_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Of a whole object of one of these kinds; raises KeyError for any other."""
    spec = SPECS[manifest["apiVersion"], manifest["kind"]]
    return _object("apiVersion", "kind", "metadata", "spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)
