"""docs/openssf.md answers each criterion of the badge's level "passing" once, with a proof that exists."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/openssf.md").read_text(encoding="utf-8")
ROWS = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in PAGE.splitlines() if line[:3] == "| `"]
ANSWERS = ("met", "not applicable", "open")
CRITERIA = [
    "description_good", "interact", "contribution", "contribution_requirements", "floss_license", "floss_license_osi",
    "license_location", "documentation_basics", "documentation_interface", "sites_https", "discussion", "english",
    "maintained",
    "repo_public", "repo_track", "repo_interim", "repo_distributed", "version_unique", "version_semver", "version_tags",
    "release_notes", "release_notes_vulns",
    "report_process", "report_tracker", "report_responses", "enhancement_responses", "report_archive",
    "vulnerability_report_process", "vulnerability_report_private", "vulnerability_report_response",
    "build", "build_common_tools", "build_floss_tools", "test", "test_invocation", "test_most",
    "test_continuous_integration", "test_policy", "tests_are_added", "tests_documented_added", "warnings",
    "warnings_fixed", "warnings_strict",
    "know_secure_design", "know_common_errors", "crypto_published", "crypto_call", "crypto_floss", "crypto_keylength",
    "crypto_working", "crypto_weaknesses", "crypto_pfs", "crypto_password_storage", "crypto_random", "delivery_mitm",
    "delivery_unsigned", "vulnerabilities_fixed_60_days", "vulnerabilities_critical_fixed", "no_leaked_credentials",
    "static_analysis", "static_analysis_common_vulnerabilities", "static_analysis_fixed", "static_analysis_often",
    "dynamic_analysis", "dynamic_analysis_unsafe", "dynamic_analysis_enable_assertions", "dynamic_analysis_fixed",
]  # fmt: skip
"""Level 0 of criteria/criteria.yml in coreinfrastructure/best-practices-badge, at 0714292."""
NOT_APPLICABLE = {"release_notes_vulns", "vulnerability_report_response", "dynamic_analysis_unsafe"}
"""Those of our answers that the badge allows to be so."""


def test_every_criterion_is_answered_once_in_the_badges_order() -> None:
    assert [row[0].strip("`") for row in ROWS] == CRITERIA


def test_every_answer_is_one_of_three_and_has_a_proof() -> None:
    assert [row for row in ROWS if len(row) != 3 or row[1] not in ANSWERS or not row[2]] == []
    assert {row[0].strip("`") for row in ROWS if row[1] == "not applicable"} == NOT_APPLICABLE
    counts = Counter(row[1] for row in ROWS)
    words = " ".join(PAGE.split())
    stated = re.search(r"at commit [0-9a-f]{7}: (\d+) met, (\d+) not applicable, (\d+) open\.", words)
    assert stated is not None
    assert [int(number) for number in stated.groups()] == [counts[answer] for answer in ANSWERS]


def test_every_file_target_and_option_that_a_proof_names_exists() -> None:
    """Links are checked with those of all pages, tests/test_documents.py."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    spans = [span for row in ROWS for span in re.findall(r"`([^`]+)`", row[2])]
    made = {span.removeprefix("make ") for span in spans if span.startswith("make ")}
    assert made <= set(targets)
    paths = {span for span in spans if "/" in span or span in {"exporter", "tests", "Dockerfile", "pyproject.toml"}}
    assert len(paths) >= 10
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    assert set(spans) - paths - {f"make {target}" for target in made} == {
        "main", "mypy --strict", "os.urandom", "release.yml", "secrets",
    }  # fmt: skip
