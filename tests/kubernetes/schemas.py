"""Objects held against the schemas of the Kubernetes API, which the package kubernetes-validate ships as files.

Owns where those files are, and that each is compiled once a process: the package's own `validate` reads a megabyte for
each object. Refuses to render or make objects.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonschema_rs import Draft202012Validator, Registry, ValidationError

__all__ = ["ValidationError", "validate"]


@cache
def _folder(version: str, *, strict: bool) -> Path:
    found = find_spec("kubernetes_validate")
    assert found, "kubernetes-validate is not installed: make .venv/.installed"
    assert found.submodule_search_locations
    (root,) = found.submodule_search_locations
    (folder,) = Path(root, "kubernetes-json-schema").glob(f"v{version}.*-local{'-strict' * strict}")
    return folder


@cache
def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def _validator(version: str, api_version: str, kind: str, *, strict: bool) -> Draft202012Validator:
    folder = _folder(version, strict=strict)
    group, _, name = api_version.rpartition("/")
    prefix = f"{group.partition('.')[0]}-{name}" if group else name
    schema = _read(folder / f"{kind.lower()}-{prefix}.json")
    definitions = _read(folder / "_definitions.json")
    return Draft202012Validator(schema, registry=Registry([(definitions["$id"], definitions)]))


def validate(manifest: Mapping[str, Any], version: str, *, strict: bool) -> None:
    """Refuse what this version of Kubernetes would; `strict`: unknown fields too. Raises ValidationError."""
    _validator(version, manifest["apiVersion"], manifest["kind"], strict=strict).validate(manifest)
