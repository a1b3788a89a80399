"""Tests redaction: secrets by place and by form, names if anonymous, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from exporter.checkup.bundle import (
    Redaction,
    known_secrets,
    redacted,
    redacted_page,
    register_observations,
    register_page,
)
from exporter.config import Config, PrivacySettings, WebSettings
from exporter.core.model import Allocation, Device, Fault, Observation, Owner, Process, Reading, Spec, TrainingReport
from exporter.core.policy import Policy
from exporter.registry import SlurmSettings

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"
HASH = "$2b$12$abcdefghijklmnopqrstuuN9qo8uLOickgx2ZMRZoMyeIjZAgcfl7"
KEY = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\nAgEGCCqGSM49AwEHBG0\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"the header was {JWT} and then", JWT),
        (f"admin: {HASH}", HASH),
        (f"cert\n{KEY}and more", "MIGHAgEAMBMGByqGSM49"),
        ("-----BEGIN RSA PRIVATE KEY-----\ncut off here", "cut off here"),
        ("login with password=hunter2 at once", "hunter2"),
        ('{"api_key": "abc def"}', "abc def"),
        ("token: 'x y z'", "x y z"),
        ("export SLURM_JWT=abcdef", "abcdef"),
        ("WANDB_API_KEY=0123abcd", "0123abcd"),
        ("ask http://ada:lovelace@host:80/x", "lovelace"),
        ("Authorization: Bearer abcdef0123", "abcdef0123"),
        ("client_secret = s3cr3t", "s3cr3t"),
    ],
)
def test_what_looks_like_a_secret_is_taken_out(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in Redaction().text(text)


@pytest.mark.parametrize(
    "text",
    [
        "slurm.restd_token_file: /etc/slurm/token: cannot be read",
        'restd_token_file = "/etc/slurm/token"',
        "12 prompt_tokens: 5",
        "tokens=12",
        "100 % of 3.0 s were seen on 8 devices",
        "http://127.0.0.1:9400/metrics could not be read",
        "GPU-5700b000-0000-0000-0000-000000000001",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert Redaction().text(text) == text


def test_secrets_known_by_their_place_are_looked_for_everywhere(tmp_path: Path) -> None:
    for name, text in (
        ("key", "  swordfish-one\n"), ("jwt", "swordfish-two"),
        ("web.yaml", f"users:\n  a: {HASH}\nkey_file: tls.key\n"),
        ("tls.key", "-----BEGIN X-----\nswordfish-three\n-----END X-----\n"), ("token", "swordfish-four"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
    config = Config(
        privacy=PrivacySettings(users="hash", key_file=f"{tmp_path / 'key'}"),
        slurm=SlurmSettings(restd_token_file=f"{tmp_path / 'jwt'}"),
        web=WebSettings(config_file=f"{tmp_path / 'web.yaml'}"),
    )
    secrets = known_secrets(
        config, {"SLURM_JWT": "swordfish-five", "MY_TOKEN_FILE": "/not/this", "HOME": "/root", "A_TOKEN": "ab"}
    )
    text = f"swordfish-one swordfish-two swordfish-three swordfish-five {HASH} /not/this /root ab"
    assert Redaction(secrets).text(text) == "*** *** *** *** *** /not/this /root ab"


def owner(**more: Any) -> Owner:
    said = {"job_id": "ada/train", "user": "ada", "name": "batch", "comment": "password=hunter2"} | more
    return Owner(**said)


def observation(who: Owner) -> Observation:
    reading = Reading(
        "GPU-1", 0, 10**9, power_watts=500.0, processes=(Process(7, name="/home/ada/x", job_id=who.job_id),)
    )
    return Observation(
        at=10**9, wall=5, readings=(reading,), devices=(Device("GPU-1", "0", "NVIDIA H100", Spec("batch")),),
        allocations=(Allocation("GPU-1", who, 0),), source="nvml", faults=(Fault("odd", "ada's token=hunter3 is odd"),),
        reports=(TrainingReport(who.job_id, 0, 10**9, run="ada-run", tokens=5.0),),
    )  # fmt: skip


def test_a_trace_without_secrets_is_the_same_trace_otherwise() -> None:
    before = observation(owner())
    after = redacted(before, Redaction(), anonymous=False)
    assert after.allocations is not None
    assert after.allocations[0].owner == owner(comment="password=***")
    assert after.faults[0].message == "ada's token=*** is odd"
    assert (after.readings, after.devices, after.reports) == (before.readings, before.devices, before.reports)


def test_an_anonymous_trace_names_nobody_and_stays_one() -> None:
    """The job has the name of a value elsewhere, which is kept."""
    redaction, before = Redaction(key=b"k" * 32), observation(owner(account="ada-lab"))
    register_observations(redaction, [before])
    after = redacted(before, redaction, anonymous=True)
    assert after.allocations is not None
    who = after.allocations[0].owner
    assert (who.user[:5], who.name[:5], who.job_id[:4], who.account[:8]) == ("user-", "name-", "job-", "account-")
    assert who.workload_class == "batch"
    assert after.devices == before.devices
    processes = after.readings[0].processes
    assert processes is not None
    assert (processes[0].job_id, processes[0].name, processes[0].pid) == (who.job_id, "", 7)
    assert after.reports[0].job_id == who.job_id
    assert "ada" not in repr(after)
    assert "hunter" not in repr(after)
    assert after.readings[0].power_watts == 500.0


def test_numbers_of_slurm_s_jobs_root_and_nobody_are_nobody_s_names() -> None:
    redaction = Redaction(key=b"k" * 32)
    register_observations(redaction, [observation(owner(job_id="123_4", user="root"))])
    assert redaction.text("job 123_4 of root, nobody, ada") == "job 123_4 of root, nobody, ada"


def test_two_people_stay_two_and_another_archive_tells_them_otherwise() -> None:
    one, other = Redaction(key=b"1" * 32), Redaction(key=b"2" * 32)
    for redaction in (one, other):
        redaction.register("user", "ada", "bob")
    assert len({one.name("ada"), one.name("bob"), other.name("ada"), "ada", "bob"}) == 5
    assert one.text("ada, adam, ada-b") == f"{one.name('ada')}, adam, {one.name('ada')}-b"


def test_without_a_key_names_stay() -> None:
    redaction = Redaction()
    redaction.register("user", "ada")
    assert redaction.text("ada") == "ada"


PAGE = """\
# HELP x Basic words of ours for user="ada".
gpu_efficiency_job_info{job_id="ml/job/x",user="ada",name="password=hunter2",workload_class="batch",gpu="0"} 1
gpu_efficiency_ticks_total 5
"""


def test_a_page_of_metrics_is_redacted_label_by_label() -> None:
    page = redacted_page(PAGE, Redaction())
    assert 'name="password=***"' in page
    assert page.replace("***", "hunter2") == PAGE


def test_an_anonymous_page_names_nobody() -> None:
    redaction = Redaction(key=b"k" * 32)
    register_page(redaction, PAGE)
    page = redacted_page(PAGE, redaction).split("\n", 1)[1]
    assert not [word for word in ("ada", "ml/job/x", "hunter2") if word in page]
    assert 'workload_class="batch",gpu="0"} 1' in page


def test_the_policy_is_no_secret() -> None:
    assert Redaction().tree({"a": [1, "x", None], "policy": f"{Policy()}"})["a"] == [1, "x", None]
