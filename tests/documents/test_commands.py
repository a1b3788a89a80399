"""Whatever a page shows to be copied still works: commands, flags, queries and configurations of every document.

A block is of a known class, or it fails: shell of known programs, PromQL, TOML of our configuration, YAML of known
files, Python, or text that is no input. Programs of a platform that no test has are listed in CONTRIBUTING.md.
"""

import ast
import re
import shlex
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from exporter.cli import build_parser
from exporter.cli.command_line import describe_commands
from exporter.config import load
from exporter.core.policy import Policy
from exporter.preview.scoring import policy_rows
from exporter.web.web_config import WebConfigFile
from tests.alerts.lint import SCRAPED, Series, faults_of_query, known_to, rules
from tests.alerts.promql import parse
from tests.documents.blocks import LANGUAGES, RECORDS, ROOT, Block, blocks, commands, every_block, prose
from tests.documents.ours import NAMES, arguments, calls, of_block, quoted
from tests.each import each
from tests.kubernetes import schemas
from tests.test_documents import PAGES

BLOCKS = every_block()
SHELL = [block for block in BLOCKS if block.language == "sh"]
HERE = frozenset({
    ".venv/bin/gpu-efficiency", ".venv/bin/pip", ".venv/bin/pytest", ".venv/bin/python", "awk", "basename", "break",
    "cat", "cd", "curl", "date", "df", "echo", "findmnt", "git", "gpu-efficiency", "grep", "head", "install", "jq",
    "ln", "make", "mkdir", "mv", "openssl", "ping", "pipx", "promtool", "ps", "python", "python3", "rm", "seq",
    "sleep", "sort", "source", "tail", "tee", "test", "timeout", "tr", "uvx", "/opt/gpu-efficiency/bin/gpu-efficiency",
    "/opt/gpu-efficiency/bin/pip",
})  # fmt: skip
"""Programs of a shell, of Debian, or of this project."""
PLATFORMS: Mapping[str, frozenset[str]] = {
    "a container engine": frozenset({"docker"}),
    "a Kubernetes cluster": frozenset({"gcloud", "helm", "kubectl"}),
    "a host with systemd": frozenset({
        "apt", "chronyc", "dmesg", "journalctl", "runuser", "systemctl", "systemd-sysusers", "systemd-tmpfiles",
        "userdel",
    }),
    "a Slurm cluster": frozenset({"sacct", "scontrol", "sdiag", "sinfo", "squeue"}),
    "an NVIDIA GPU": frozenset({"dcgmi", "nvidia-smi", "py-spy", "torchrun"}),
    "a server of Mimir": frozenset({"mimirtool"}),
    "another host": frozenset({"ansible-playbook", "ssh"}),
}  # fmt: skip
"""Programs that need more than a machine for tests, by what they need."""
SLURM_S = {
    "slurm_node_gpus": Series(SCRAPED | {"node"}),
    "slurm_account_jobs_gpus_alloc": Series(SCRAPED | {"account"}),
    "slurm_bf_queue_len": Series(SCRAPED),
    "slurm_bf_last_depth": Series(SCRAPED),
}
"""Of slurmctld 26.05, as tests/e2e/test_slurm_accounting.py scrapes them."""
KNOWN = known_to(rules()) | SLURM_S


@cache
def parser() -> ArgumentParser:
    return build_parser()


def fenced(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@each("block", BLOCKS, ids=str)
def test_a_block_is_of_a_known_class(block: Block) -> None:
    assert block.language in LANGUAGES, "name its language behind the fence: " + ", ".join(sorted(LANGUAGES))


# -- shell --


@each("block", SHELL, ids=str)
def test_a_command_is_of_a_known_program(block: Block) -> None:
    known = HERE.union(*PLATFORMS.values())
    unknown = {words[0] for words in commands(block.text)} - known
    assert unknown == set(), "add it to HERE or PLATFORMS; what is no command is fenced, as text for instance"


def test_shell_is_shell() -> None:
    """All blocks in one script, each in a function that nobody calls."""
    script = "\n".join(f"f{number}() {{\n{block.text}\n}}" for number, block in enumerate(SHELL))
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@cache
def flags(command: str) -> frozenset[str]:
    """Flags of one of our commands."""
    (found,) = [each for each in describe_commands() if each.name == command]
    return frozenset(name for argument in found.flags for name in argument.flags)


def unknown_flags(words: list[str]) -> set[str]:
    """Flags that the command does not have, abbreviated ones among them."""
    name, *rest = words
    return {word.partition("=")[0] for word in rest if word[:1] == "-"} - flags(name)


@each("block", SHELL, ids=str)
def test_our_commands_are_what_the_program_takes(block: Block) -> None:
    for words in of_block(block):
        try:
            given = parser().parse_args(words)
        except SystemExit as end:
            raise ValueError(f"gpu-efficiency {shlex.join(words)} is refused") from end
        assert unknown_flags(words) == set()
        assert all(policy_rows(Policy(), [text]) for text in getattr(given, "policy", []))


def test_there_are_commands_in_the_pages_that_people_read_first() -> None:
    pages = {block.page for block in SHELL for _ in of_block(block)}
    assert {"README.md", "docs/install.md", "docs/job-reports.md", "docs/top.md", "docs/image.md"} <= pages


@each("page", sorted(set(PAGES) - RECORDS))
def test_commands_in_the_prose_have_their_flags(page: str) -> None:
    """They may lack a value, or have a placeholder: what is checked is that the command and its flags exist."""
    for line in quoted(prose(page, (ROOT / page).read_text(encoding="utf-8"))):
        words = shlex.split(line)
        if words[0][:1] != "-":
            assert words[0] in NAMES
            assert unknown_flags(words) == set()


def test_the_platforms_are_listed_where_contributors_look() -> None:
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert [name for name in PLATFORMS if name not in text] == []
    named = {words[0] for block in SHELL for words in commands(block.text)}
    assert {name for programs in PLATFORMS.values() for name in programs} <= named | {"helm"}


# -- queries --


_CONTINUES = re.compile(r"\s|[)+\-*/%^<>=!]|(?:and|or|unless|on|ignoring|group_left|group_right|by|without|offset)\b")


def queries(block: Block) -> list[str]:
    """The queries of a block: a comment or an empty line ends one, and so does a line that the next does not go on."""
    found = [""]
    for line in block.text.splitlines():
        if not line.strip() or line.startswith("#"):
            found.append("")
        elif not found[-1] or _CONTINUES.match(line) or not _is_whole(found[-1]):
            found[-1] = f"{found[-1]}\n{line}".strip()
        else:
            found.append(line)
    return [query for query in found if query]


def _is_whole(query: str) -> bool:
    try:
        return bool(parse(query))
    except ValueError:
        return False


@each("block", fenced("promql"), ids=str)
def test_a_query_asks_for_what_exists(block: Block) -> None:
    found = queries(block)
    assert found
    assert [fault for query in found for fault in faults_of_query(query, KNOWN)] == []


@pytest.mark.e2e
def test_promtool_reads_every_query(tmp_path: Path) -> None:
    found = [query for block in fenced("promql") for query in queries(block)]
    asked = [{"record": f"a:b{number}", "expr": query} for number, query in enumerate(found)]
    rules_file = tmp_path / "rules.yaml"
    rules_file.write_text(yaml.safe_dump({"groups": [{"name": "documents", "rules": asked}]}))
    done = subprocess.run(["promtool", "check", "rules", f"{rules_file}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- configurations --


@each("block", fenced("toml"), ids=str)
def test_toml_is_a_configuration(tmp_path: Path, block: Block) -> None:
    file = tmp_path / "example.toml"
    file.write_text(block.text, encoding="utf-8")
    load(file, environ={})


_PROMETHEUS = ({"rule_files"}, {"scheme", "tls_config", "basic_auth"}, {"match[]"})
"""Keys of pieces of Prometheus' configuration."""


def _fault_of(tree: Any) -> str:
    """What is wrong with a YAML document of a page; empty: nothing."""
    if isinstance(tree, list):
        alerts = [rule for rule in tree if rule.keys() >= {"alert", "expr"}]
        return f"{[faults_of_query(rule['expr'], KNOWN) for rule in alerts]}".strip("[], ") if alerts else "no rules"
    if set(tree) <= set(WebConfigFile.__struct_fields__):
        msgspec.convert(tree, WebConfigFile)
        return ""
    values = yaml.safe_load((ROOT / "helm/gpu-efficiency/values.yaml").read_text(encoding="utf-8"))
    if set(tree) >= {"apiVersion", "kind"}:
        for version in ("1.27", "1.34"):
            schemas.validate(tree, version, strict=True)
        return ""
    known = set(tree) in _PROMETHEUS or set(tree) <= set(values)
    return "" if known else f"neither Prometheus', nor the chart's, nor the web configuration: {sorted(tree)}"


@each("block", fenced("yaml"), ids=str)
def test_yaml_is_a_file_that_we_know(block: Block) -> None:
    assert _fault_of(yaml.safe_load(block.text)) == ""


@each("block", fenced("python"), ids=str)
def test_python_is_python(block: Block) -> None:
    """Each piece between empty lines is statements, or rows to put into a table or a call."""
    pieces = re.split(r"\n\s*\n(?=\S)", block.text)
    forms = [(piece, f"{{{piece}}}", f"f({piece})") for piece in pieces]
    assert _is_python(block.text) or all(any(map(_is_python, form)) for form in forms)


def _is_python(text: str) -> bool:
    try:
        return bool(ast.parse(text))
    except SyntaxError:
        return False


# -- what reads them --

PAGE = """# A page

    make run   # it's a start
    gpu-efficiency top --once \\
      --jobs | grep 'a;b'; for x in *; do rm "$x"; done

1. A list:

       kubectl exec -it POD -- gpu-efficiency pause --for 2h [--reason "a b"]

    which goes on here, with `gpu-efficiency leaks --json` and `top
    --nothing`.

```toml
    [web]
```
"""


def test_blocks_are_found_with_their_language_and_place() -> None:
    found = list(blocks("a.md", PAGE))
    assert [(block.line, block.language) for block in found] == [(3, "sh"), (9, "sh"), (14, "toml")]
    assert found[2].text == "[web]"
    assert list(quoted(prose("a.md", PAGE))) == ["leaks --json", "top --nothing"]


def test_commands_of_a_block_are_found_and_ours_among_them() -> None:
    first, second, _ = blocks("a.md", PAGE)
    assert [words[0] for words in commands(first.text)] == ["make", "gpu-efficiency", "grep", "rm"]
    assert list(of_block(first)) == [["top", "--once", "--jobs"]]
    assert list(of_block(second)) == [["pause", "--for", "2h", "--reason", "a b"]]


def test_commands_that_other_programs_run_are_ours_too() -> None:
    def of(line: str) -> Iterator[list[str]]:
        return (arguments(found) for words in commands(line) for found in calls(words))

    assert list(of("docker run --rm registry.example/a:1 demo")) == [["demo"]]
    assert list(of("ssh -t node gpu-efficiency top")) == [["top"]]
    assert list(of("source <(/opt/gpu-efficiency/bin/gpu-efficiency completion bash)")) == [["completion", "bash"]]
    assert list(of("kubectl label namespace gpu-efficiency a=b")) == []
    assert list(of("cat <<'END'\ngpu-efficiency nothing\nEND\n.venv/bin/python -m exporter leaks")) == [["leaks"]]


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        ([{"alert": "A", "expr": "gpu_efficiency_nothing == 0"}], "gpu_efficiency_nothing"),
        ([{"a": 1}], "no rules"),
        ({"podMonitors": {}}, "neither Prometheus'"),
        ({"source": "dcgm"}, ""),
    ],
)
def test_yaml_of_no_known_file_is_a_fault(tree: Any, fault: str) -> None:
    assert (fault in _fault_of(tree)) if fault else _fault_of(tree) == ""
