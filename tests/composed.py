"""Reads compose.yaml: which of this project's files each service sees where, and what its command line says.

Owns the way from a path in a container to one here. Refuses to judge.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import yaml

from exporter.cli.simulate import demo_arguments

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NODES = {name: service for name, service in SERVICES.items() if name.startswith("gpu-node-")}


def mounts(service: str) -> list[tuple[str, str, str]]:
    """Source, place in the container, and mode."""
    found = (re.fullmatch(r"([^:]+):([^:]+)(?::(\w+))?", text) for text in SERVICES[service].get("volumes", []))
    return [(m[1], m[2], m[3] or "rw") for m in found if m]


def outside(service: str, path: str) -> Path:
    """The file or folder of this project that the service sees at that path."""
    held = [(source, at) for source, at, _ in mounts(service) if path == at or path.startswith(f"{at}/")]
    assert held, f"nothing is mounted at {path} of {service}"
    source, at = held[0]
    return ROOT / source / path[len(at) + 1 :]


def flag(service: str, name: str) -> str:
    """The value of `--name=value` on its command line."""
    command: list[str] = SERVICES[service]["command"]
    return next(word.removeprefix(f"--{name}=") for word in command if word.startswith(f"--{name}="))


def words(node: str) -> list[str]:
    """The node's command line, with the configuration's path as it is here."""
    command: list[str] = SERVICES[node]["command"]
    return [f"{outside(node, word)}" if word.startswith("/etc/") else word for word in command]


def arguments(node: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    demo_arguments(parser)
    return parser.parse_args(words(node)[1:])


def settings() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(outside("prometheus", flag("prometheus", "config.file")).read_text())
    return found
