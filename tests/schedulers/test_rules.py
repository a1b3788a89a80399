"""Class, team and limits of a job: from the operator's rules in their order, then the built-in ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert

from exporter.config import ConfigError, WorkloadRule, WorkloadSettings, check_rules
from exporter.core.model import Owner
from exporter.schedulers.rules import DEFAULTS, LONGEST, Rules


def judged(owner: Owner, *rules: WorkloadRule, command: str = "", labels: dict[str, str] | None = None) -> Owner:
    return Rules(WorkloadSettings(rules)).apply(owner, command=command, labels=labels)


JOB = Owner("7", "slurm", "alice", "physics", "gpu", qos="normal", name="train")


# The operator's rules.


def test_each_field_comes_from_the_first_rule_that_fits_and_gives_it() -> None:
    said = judged(
        JOB,
        WorkloadRule(team="nobody", account="biology"),
        WorkloadRule(team="hep", account="phys.*"),
        WorkloadRule(team="late", workload_class="serving", zombie_seconds=60.0),
        WorkloadRule(workload_class="interactive", zombie_seconds=70.0),
        WorkloadRule(useful_pipe="fp64", partition="gpu"),
    )
    assert (said.team, said.workload_class, said.zombie_seconds) == ("hep", "serving", 60.0)
    assert said.useful_pipe == "fp64"


@pytest.mark.parametrize("field", ["scheduler", "partition", "qos", "account", "user", "namespace", "name", "kind"])
def test_every_field_is_matched_whole(field: str) -> None:
    owner = convert({"job_id": "7", field: "abc"}, Owner)

    def team(pattern: str) -> str:
        return judged(owner, convert({"team": "t", field: pattern}, WorkloadRule)).team

    assert team("a.c") == "t"
    assert [team(pattern) for pattern in ("ab", "bc", "abcd", "ABC", "x")] == [""] * 5


def test_all_that_a_rule_gives_must_fit() -> None:
    rule = WorkloadRule(team="t", account="physics", partition="gpu", command="train", label="app=.*")
    assert judged(JOB, rule, command="python train.py", labels={"app": "x"}).team == "t"
    assert judged(JOB, rule, command="python train.py").team == ""
    assert judged(JOB, rule, labels={"app": "x"}).team == ""
    other = Owner("7", account="physics", partition="cpu")
    assert judged(other, rule, command="python train.py", labels={"app": "x"}).team == ""


def test_a_command_fits_anywhere_and_a_label_whole_and_only_where_it_is() -> None:
    assert judged(JOB, WorkloadRule(team="t", command=r"\bvllm\b"), command="python -m vllm serve x").team == "t"
    rule = WorkloadRule(team="t", label="app.kubernetes.io/name=ll.*")
    assert judged(JOB, rule, labels={"app.kubernetes.io/name": "llama"}).team == "t"
    assert judged(JOB, rule, labels={"app.kubernetes.io/name": "small"}).team == ""
    anything = WorkloadRule(team="t", label="app=(?s:.*)")
    assert judged(JOB, anything, labels={"app": ""}).team == "t"
    assert judged(JOB, anything, labels={"other": ""}).team == ""
    assert judged(JOB, anything).team == ""


def test_a_labels_regular_expression_may_hold_an_equals_sign() -> None:
    assert judged(JOB, WorkloadRule(team="t", label="a=b=c"), labels={"a": "b=c"}).team == "t"


def test_what_no_rule_gives_stays_as_it_was() -> None:
    owner = Owner("7", team="own", zombie_seconds=5.0, workload_class="serving")
    assert Rules(WorkloadSettings(defaults=False)).apply(owner) == owner
    assert Rules(WorkloadSettings((WorkloadRule(team="t"),), defaults=False)).apply(owner).team == "t"
    assert Rules().apply(owner) == owner


def test_the_operators_rules_come_before_the_built_in_and_may_stand_alone() -> None:
    notebook = Owner("7", name="jupyter-alice")
    assert Rules().apply(notebook).workload_class == "interactive"
    assert judged(notebook, WorkloadRule(workload_class="batch", name="jupyter-.*")).workload_class == "batch"
    assert Rules(WorkloadSettings(defaults=False)).apply(notebook).workload_class == "batch"


def test_only_the_beginning_of_a_value_is_looked_at() -> None:
    rule = WorkloadRule(team="t", name="(?s).*end")
    assert judged(Owner("7", name="a" * (LONGEST - 3) + "end"), rule).team == "t"
    assert judged(Owner("7", name="a" * LONGEST + "end"), rule).team == ""
    assert judged(JOB, WorkloadRule(team="t", command="end"), command="a" * LONGEST + "end").team == ""
    assert judged(JOB, WorkloadRule(team="t", label="a=.*end"), labels={"a": "a" * LONGEST + "end"}).team == ""


def test_a_verdict_is_kept_apart_for_each_command_and_label() -> None:
    rules = Rules(WorkloadSettings((WorkloadRule(team="c", command="x"), WorkloadRule(team="l", label="a=1"))))
    verdicts = [
        rules.apply(JOB, command=command, labels=labels).team
        for command, labels in (("x", {}), ("y", {}), ("y", {"a": "1"}), ("y", {"a": "2"}), ("x", {"a": "2"}))
    ]
    assert verdicts == ["c", "", "l", "", "c"]


# Rules that cannot be used.


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (WorkloadRule(team="t", partition="("), r"workload\.rules\[1\]\.partition: '\(' is no regular expression: "),
        (WorkloadRule(team="t", command="*"), r"workload\.rules\[1\]\.command: '\*' is no regular expression"),
        (WorkloadRule(team="t", label="app=["), r"workload\.rules\[1\]\.label: '\[' is no regular expression"),
        (WorkloadRule(team="t", label="app"), r"workload\.rules\[1\]\.label: 'app' is not key=regular expression"),
        (WorkloadRule(team="t", label="=app"), r"workload\.rules\[1\]\.label: '=app' is not key="),
        (WorkloadRule(partition="gpu"), r"workload\.rules\[1\]: gives nothing"),
        (WorkloadRule(team="t", name="a{99999999999}"), r"workload\.rules\[1\]\.name: .* is no regular expression"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_by_number_field_and_reason(rule: WorkloadRule, message: str) -> None:
    fine = WorkloadRule(team="t")
    with pytest.raises(ConfigError, match=message):
        check_rules([fine, rule])
    with pytest.raises(ConfigError, match=message):
        Rules(WorkloadSettings((fine, rule)))


# The built-in classes.


@pytest.mark.parametrize(
    ("owner", "command", "expected"),
    [
        (Owner("7", kind="interactive"), "", "interactive"),
        (Owner("7", kind="notebook"), "", "interactive"),
        (Owner("7", kind="session"), "vllm serve m", "interactive"),  # a user tries a server out
        (Owner("7", kind="deployment"), "", "serving"),
        (Owner("7", kind="statefulset"), "jupyter-lab", "interactive"),  # how Kubeflow runs notebooks
        (Owner("7", kind="leaderworkerset"), "", "serving"),
        (Owner("7", kind="inferenceservice"), "", "serving"),
        (Owner("7", kind="rayservice"), "", "serving"),
        (Owner("7", kind="daemonset"), "", "serving"),
        (Owner("7", kind="job"), "", "batch"),
        (Owner("7", kind="pytorchjob"), "", "batch"),
        (Owner("7", kind="array"), "", "batch"),
        (Owner("7", name="jupyter-alice"), "", "interactive"),
        (Owner("7", name="sys/dashboard/sys/bc_desktop"), "", "interactive"),
        (Owner("7", name="spawner-JupyterHub"), "", "interactive"),
        (Owner("7", partition="interactive"), "", "interactive"),
        (Owner("7", partition="gpu-debug"), "", "interactive"),
        (Owner("7", partition="DEV_A100"), "", "interactive"),
        (Owner("7", partition="debug2"), "", "interactive"),
        (Owner("7", partition="devices"), "", "batch"),
        (Owner("7", partition="gpu-serving"), "", "serving"),
        (Owner("7", partition="inference"), "", "serving"),
        (Owner("7", partition="observing"), "", "batch"),
        (Owner("7", qos="interactive"), "", "interactive"),
        (Owner("7", qos="serving-high"), "", "serving"),
        (Owner("7", qos="normal"), "", "batch"),
        (Owner("7", partition="serving", qos="debug"), "", "interactive"),
        (Owner("7"), "python -m ipykernel_launcher -f k.json", "interactive"),
        (Owner("7"), "/usr/lib/rstudio-server/bin/rsession", "interactive"),
        (Owner("7"), "/usr/bin/python3 /usr/local/bin/vllm serve m", "serving"),
        (Owner("7"), "python3 -m vllm.entrypoints.openai.api_server", "serving"),
        (Owner("7"), "VLLM::EngineCore", "serving"),
        (Owner("7"), "python -m sglang.launch_server --model m", "serving"),
        (Owner("7"), "sglang::scheduler_TP0", "serving"),
        (Owner("7"), "/opt/tritonserver/bin/tritonserver --model-repository=/m", "serving"),
        (Owner("7"), "text-generation-launcher", "serving"),
        (Owner("7"), "trtllm-serve m", "serving"),
        (Owner("7"), "/usr/local/bin/ollama runner --model m", "serving"),
        (Owner("7"), "./llama-server -m m.gguf", "serving"),
        (Owner("7"), "lmdeploy serve api_server m", "serving"),
        (Owner("7"), "python -m dynamo.vllm --model m", "serving"),
        (Owner("7"), "ray::ServeReplica:app:Model", "serving"),
        (Owner("7", partition="debug"), "vllm serve m", "serving"),  # the command counts more than the partition
        (Owner("7"), "python train.py --data /data/vllm", "batch"),
        (Owner("7"), "python train.py --data /data/ollama/x --out /models/tritonserver/", "batch"),
        (Owner("7"), "python torch_dynamo.py", "batch"),
        (Owner("7"), "python train.py --debug", "batch"),
        (Owner("7"), "", "batch"),
    ],
)
def test_the_class_by_default(owner: Owner, command: str, expected: str) -> None:
    assert Rules().apply(owner, command=command).workload_class == expected


def test_every_built_in_rule_gives_a_class() -> None:
    check_rules(DEFAULTS)
    assert all(rule.workload_class and not rule.team for rule in DEFAULTS)


@given(st.text(max_size=200), st.text(max_size=200), st.text(max_size=50))
def test_whatever_users_write_is_judged(name: str, command: str, label: str) -> None:
    said = judged(Owner("7", name=name), WorkloadRule(team="t", label="a=.+"), command=command, labels={"a": label})
    assert said.workload_class in {"batch", "interactive", "serving"}
    assert said.name == name
