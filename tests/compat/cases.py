"""The public surface as a table of cases: commands, stories, reports. What serves is in `served.py`.

Each case is played on both checkouts, in a folder of its own, and must come to the same outputs.
"""

import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.compat.checkouts import Checkout
from tests.compat.plays import Play
from tests.compat.recorded.stores import EVERY, STORES, lay_out
from tests.compat.served import SERVED

COMMANDS = (
    "serve", "demo", "record", "replay", "preview", "backfill", "report", "top", "simulate", "cluster", "pause",
    "resume", "check-config", "install-check", "leaks", "cardinality", "metrics",
)  # fmt: skip
GOLDEN = {
    "carpenter": (1, 60, None), "copy_loop": (1, 10, None), "deadlock": (2, 10, 1500), "demo": (8, 60, 420),
    "fleet": (2, 30, 900), "healthy_training": (1, 10, 1900), "idle_context": (1, 60, None),
    "idle_poller": (1, 30, 1800), "input_starved_training": (1, 1, 600), "large_gemm": (1, 10, None),
    "leaked_process": (2, 10, 900), "long_first_step": (1, 30, 1500), "lost_gpu": (2, 10, 1300),
    "memory_bound_decode": (1, 10, 900), "nic_hang": (2, 10, 1020), "rank0_checkpoint": (2, 10, 720),
    "rank0_evaluation": (2, 10, 1500), "serving_lull": (1, 60, 15300), "spin_kernel": (1, 10, None),
    "straggler": (2, 10, 900), "telemetry_outage": (1, 10, 1200), "throttled": (1, 10, 1500),
    "zombie_notebook": (1, 60, None),
}  # fmt: skip
"""GPUs, period and duration of the stories in tests/golden; their seed is 7."""
_LEAKS = (
    "memory_bound", "low_parallelism", "idle_allocation", "oversized_allocation", "host_overhead", "hung",
    "failure_recovery", "checkpoint", "rework", "exposed_communication", "pipeline_bubble", "recomputation",
    "kv_cache_wait", "kv_cache_pressure", "prefill_decode_interference", "batching", "rejected_speculation",
    "unused_drafts", "data_stall", "padding",
)  # fmt: skip
OTHERS = {
    **{
        f"{leak}{twin}": (4, 10, 900 if leak != "oversized_allocation" else 3600)
        for leak in _LEAKS
        for twin in ("", "_twin")
    },
    "carpenter_told": (1, 120, None),
    "training_waterfall": (10, 600, None),
    "inference_waterfall": (10, 600, None),
}
"""Stories that have no golden text: each leak and its twin, and the waterfalls."""


def story(play: Play, *, name: str) -> None:
    """A story's trace and truth as this checkout makes them, and what it makes of the old one's trace."""
    gpus, period, duration = (GOLDEN | OTHERS)[name]
    words = [name, "--seed", "7", "--gpus", f"{gpus}", "--period", f"{period}"]
    words += [] if duration is None else ["--duration", f"{duration}"]
    play.run("simulate", "simulate", *words, "-o", "own.jsonl", "--truth", "truth.jsonl", "--quiet")
    for file in ("own.jsonl", "truth.jsonl"):
        play.tell(file, (play.folder / file).read_text(encoding="utf-8"))
    trace = play.bring(play.inputs.trace(f"{name}.jsonl", *words))
    play.run("replay --metrics", "replay", trace, "--metrics", "--quiet", "--config", "config.toml")
    if name in GOLDEN:
        play.run("replay", "replay", trace, "--quiet")


# -- words alone --


def helps(play: Play) -> None:
    """What each command says of itself."""
    for name, words in (("none", ()), ("all", ("--help",)), ("version", ("--version",))):
        play.run(name, *words)
    for command in COMMANDS:
        play.run(command, command, "--help")


USAGES = (
    "nonsense", "--nonsense", "serve --nonsense", "serve extra", "serve --source nonsense",
    "serve --scheduler nonsense",
    "serve --config absent.toml", "serve --web.listen-address nonsense", "serve --web.listen-address 127.0.0.1:99999",
    "serve --sampling.interval-seconds 0", "serve --sampling.interval-seconds x", "serve --log.level loud",
    "serve --log.format xml", "serve --web.config-file absent.yaml --config config.toml",
    "serve --config config.toml", "serve --config config.toml --scheduler processes",
    "serve --config config.toml --scheduler processes --dcgm-exporter-url http://127.0.0.1:1/metrics",
    "record", "record trace.jsonl --duration -1", "record trace.jsonl --duration nan",
    "record x.jsonl --config config.toml --scheduler processes --dcgm-exporter-url http://127.0.0.1:1/metrics",
    "demo nonsense", "demo --board nonsense", "demo --preroll -1", "demo training_waterfall",
    "replay", "replay absent.jsonl", "replay text.jsonl", "replay empty.jsonl", "replay config.toml --metrics",
    "replay cut.jsonl", "replay cut.jsonl.gz", "replay truncated.jsonl", "replay trace.jsonl --speed 0.5",
    "replay newer.jsonl",
    "simulate nonsense -o x.jsonl", "simulate straggler --gpus 1 -o x.jsonl",
    "simulate straggler --period 0 -o x.jsonl",
    "simulate straggler --period 0.0001 -o x.jsonl", "simulate straggler --board nonsense -o x.jsonl",
    "simulate straggler --duration 5 -o trace.jsonl", "simulate straggler --duration 5 -o absent/x.jsonl",
    "preview", "preview trace.jsonl", "preview --policy hang=5m", "preview trace.jsonl --policy nonsense=5m",
    "preview trace.jsonl --policy hang=x", "preview trace.jsonl --policy hang", "preview absent.jsonl --policy hang=5m",
    "preview trace.jsonl --prometheus http://127.0.0.1:1 --policy hang=5m",
    "preview --prometheus http://127.0.0.1:1 --policy hang=5m", "preview --prometheus nonsense --policy hang=5m",
    "preview --prometheus http://127.0.0.1:1 --policy hang=5m --header nonsense",
    "backfill", "backfill trace.jsonl", "backfill trace.jsonl --simulated --label nonsense",
    "backfill trace.jsonl --simulated --label leak=x", "backfill trace.jsonl --simulated --step 3h",
    "backfill trace.jsonl --simulated -o a --folder b", "backfill trace.jsonl --store absent.db",
    "backfill --store absent.db", "backfill --store text.jsonl", "backfill trace.jsonl trace.jsonl --simulated",
    "report", "report 41 --all", "report 41 --json --html", "report --all --short", "report 41 --store absent.db",
    "report 41 --store text.jsonl", "report 41 --config config.toml", "report 41 --node http://127.0.0.1:1",
    "report 41 --node nonsense", "report 41 --prometheus http://127.0.0.1:1",
    "report 41 --prometheus http://127.0.0.1:1 --store x.db", "report 41 --at nonsense", "report 41 --since nonsense",
    "report 41 --target-emfu 2", "report --all --rent nonsense", "report --all --gpus -1", "report --all --user ada",
    "report --compare 41", "report --all --every year", "report --all --by nonsense", "report 41 --header nonsense",
    "top --once --url http://127.0.0.1:1", "top --once --url nonsense", "top --interval 0.1", "top --once --header x",
    "cluster --config no-slurm.toml", "cluster --cluster.scheduler nonsense", "cluster --cluster.refresh-seconds 1",
    "pause --for 25h", "pause --for nonsense", "pause --reason {long}", "pause --config absent.toml",
    "check-config --config absent.toml", "check-config extra", "install-check --trace-seconds 601",
    "install-check --config absent.toml", "leaks --markdown --json", "metrics --nonsense",
    "cardinality --nodes 0", "cardinality --mig-boards 9 --mig-instances 3", "cardinality --mig-boards 1",
    "cardinality --nodes 2 --nodes-per-job 3", "cardinality --reporting 5", "cardinality --shared-gpus 99",
    "cardinality --profile nonsense", "cardinality --source nonsense", "cardinality --interval 0",
)  # fmt: skip
"""What is asked in vain."""


def usages(play: Play, *, part: int, parts: int) -> None:
    """Exit statuses and what is said with them."""
    trace = play.bring(play.inputs.trace("trace.jsonl", "straggler", "--duration", "20", "--gpus", "2"))
    content = (play.folder / trace).read_bytes()
    play.write("text.jsonl", "no trace\n")
    play.write("empty.jsonl", "")
    play.write("no-slurm.toml", '[slurm]\nbin_dir = "absent"\n')
    play.write("newer.jsonl", '{"format":"gpu-efficiency-trace","version":99}\n')
    (play.folder / "cut.jsonl").write_bytes(content[: len(content) // 2])
    (play.folder / "truncated.jsonl").write_bytes(content[: content.index(b"\n") + 1])
    (play.folder / "cut.jsonl.gz").write_bytes(gzip.compress(content, mtime=0)[:-200])
    for usage in USAGES[part::parts]:
        play.run(usage.replace("/", "|"), *(word.replace("{long}", "x" * 300) for word in usage.split()))


def tables(play: Play) -> None:
    """What the program knows."""
    for words in (
        "metrics", "metrics --markdown", "leaks", "leaks --markdown", "leaks --json", "simulate", "cardinality",
        "cardinality --json", "cardinality --nodes 100 --gpus 8 --jobs 60 --reporting 20 --serving 10 --churn 500",
        "cardinality --nodes 4 --mig-boards 2 --mig-instances 14 --profile rules --json",
        "cardinality --relabel --profile rules", "cardinality --source driver --no-reports --interval 15",
    ):  # fmt: skip
        play.run(words, *words.split())


# -- the configuration --

BAD_CONFIGS = (
    "nonsense = 1", "[nonsense]\nx = 1", "[web]\nlisten = 1", "[web]\nlisten_address = 1",
    '[web]\nlisten_address = "x"',
    'source = "x"', "source = 1", "[sampling]\ninterval_seconds = 0.01", '[sampling]\ninterval_seconds = "fast"',
    '[privacy]\nusers = "hash"', '[privacy]\nusers = "hash"\nkey_file = "absent"', "[[workload.rules]]\n",
    '[[workload.rules]]\nteam = "x"\nuser = "("', '[[workload.rules]]\nteam = "x"\nlabel = "x"',
    '[[exemptions]]\nid = "a"\nreason = "b"\nexpires = 2027-01-01', '[[exemptions]]\nid = "a"\nuser = "b"',
    "[[prices]]\nper_gpu_hour = -1", '[[prices]]\nmodel = "x"', '[specs."NVIDIA X"]\npeak_flops = 1',
    '[specs."NVIDIA X"]\nnonsense = 1', '[policy_by_model."NVIDIA L4"]\nhang_seconds = -1',
    "[policy]\nhang_seconds = true", "[policy]\nnonsense = 1", "not toml", '[web]\nconfig_file = "absent.yaml"',
    "[follow]\nx = 1", '[[follow]]\nframework = "x"', '[[engines.endpoints]]\nurl = ""', '[log]\nlevel = "x"',
    '[receipts]\nkubernetes = "x"', "[history]\nkeep_days = 0", "[cluster]\nrefresh_seconds = 1",
)  # fmt: skip
GOOD_CONFIGS = {
    "empty": "",
    "boards": '[specs."NVIDIA X"]\npeak_flops = 1e14\nslices = 7\n'
    '[policy_by_model."NVIDIA L4"]\nspin_power_share = 0.15\n',
    "engines": '[[engines.endpoints]]\nurl = "http://user:secret@127.0.0.1:8000/metrics"\njob_id = "a.*"\n'
    '[engines.models."m"]\nactive_parameters = 7e9\n[[follow]]\nframework = "megatron"\npath = "/x/{job_id}.log"\n',
    "privacy": '[privacy]\nusers = "drop"\n[slurm]\nrestd_url = "http://user:secret@127.0.0.1:6820"\n',
}


def configs(play: Play) -> None:
    """Good configurations as they will be used, and what is wrong with bad ones."""
    for name, text in GOOD_CONFIGS.items():
        play.write("mine.toml", text)
        play.run(name, "check-config", "--config", "mine.toml")
    play.run("the cases' own", "check-config", "--config", "config.toml", "--web.listen-address", "[::1]:9")
    play.run("defaults", "check-config")
    for example in ("systemd/config.toml", "examples/gpu-efficiency.toml"):
        name = play.bring(play.inputs.made(Path(example).name, partial(_copied, example=example)))
        play.run(example.replace("/", "|"), "check-config", "--config", name)
    for number, text in enumerate(BAD_CONFIGS):
        play.write("mine.toml", text)
        play.run(f"bad {number}", "check-config", "--config", "mine.toml")


def _copied(old: Checkout, folder: Path, *, example: str) -> None:
    (folder / Path(example).name).write_bytes((old.path / example).read_bytes())


# -- pauses, previews, backfills --


def pauses(play: Play) -> None:
    """A pause is a file."""
    config = ("--config", "config.toml")
    play.run("resume without", "resume", *config)
    play.run("pause", "pause", *config, "--for", "90s", "--reason", "profiling", files=("pause",))
    play.run("pause again", "pause", *config, files=("pause",))
    play.run("resume", "resume", *config, files=("pause",))


POLICIES = (
    ("zombie", "zombie_notebook", ("--policy", "zombie.interactive=30m,1h,2h", "--policy", "zombie.duty=0.01,0.1")),
    ("hang", "deadlock", ("--policy", "hang=60s,5m", "--policy", "no_process=5m")),
    ("demo", "demo", ("--policy", "zombie.batch=600,1200")),
)


def previews(play: Play) -> None:
    """What other thresholds would have freed and hit."""
    for name, of, words in POLICIES:
        gpus, period, duration = GOLDEN[of]
        wanted = [of, "--seed", "7", "--gpus", f"{gpus}", "--period", f"{period}"]
        wanted += [] if duration is None else ["--duration", f"{duration}"]
        trace = play.bring(play.inputs.trace(f"{of}.jsonl", *wanted))
        for form in ((), ("--json",)):
            play.run(f"{name}{' '.join(form)}", "preview", trace, *words, *form, "--config", "config.toml", "--quiet")


def backfills(play: Play) -> None:
    """OpenMetrics of recordings and of stores."""
    trace = play.bring(
        play.inputs.trace("two.jsonl", "deadlock", "--duration", "1800", "--gpus", "2", "--period", "10")
    )
    words = ("--simulated", "--step", "60s", "--label", "cluster=a", "--quiet", "--config", "config.toml")
    play.run("a recording", "backfill", trace, *words)
    play.run("into a file", "backfill", trace, *words, "-o", "out.om", "--instance", "{host}:1", files=("out.om",))
    lay_out(play.folder)
    for name in STORES:
        play.run(f"store {name}", "backfill", "--store", f"{name}.db", "--simulated", "--quiet")
    play.run("into a folder", "backfill", "--store", "closed.db", "--simulated", "--folder", "blocks", "--quiet")
    for path in sorted((play.folder / "blocks").glob("*")):
        play.tell(f"blocks|{path.name}", path.read_text(encoding="utf-8"))


# -- reports --

FORMS = ("--json", "", "--markdown", "--html", "--short", "--line")
"""Of one job; `--short` is of one job alone."""
SUMS = (
    "--all", "--all --by user --every hour --gpus 24", "--all --by account --gpus 40 --target-emfu 0.5",
    "--user ada", "--account research", "--namespace inference", "--team language",
    "--all --rent 4.00@0.95 --rent cloud=2.00@0.4",
    "--user nobody",
)  # fmt: skip


def job_reports(play: Play, *, form: str) -> None:
    """Each job of the recorded stores, in one form."""
    lay_out(play.folder)
    words = ("--quiet", *form.split())
    for name, store in STORES.items():
        for job in store.jobs:
            play.run(f"{name} {job}".replace("/", "|"), "report", job, "--store", f"{name}.db", *words)
    first = STORES["closed"].jobs[0]
    play.run("of three stores", "report", first, *EVERY, *words, "--config", "config.toml")
    play.run("what if", "report", first, "--store", "closed.db", *words, "--target-emfu", "60%")
    play.run("no such job", "report", "none", *EVERY, *words)
    if form == "--html":
        play.run("into a file", "report", first, *EVERY, *words, "-o", "page.html", files=("page.html",))


def sums(play: Play, *, form: str) -> None:
    """Sums and comparisons over the recorded stores, in one form."""
    lay_out(play.folder)
    words = ("--quiet", *form.split())
    for wanted in SUMS:
        play.run(wanted, "report", *wanted.split(), *EVERY, "--since", "1d", *words)
    play.run("one store", "report", "--all", "--store", "closed.db", "--since", "90m", *words)
    if form != "--line":
        for number, (one, other) in enumerate((("41001", "41010"), ("41001", "inference/chat-0-4"), ("41001", "none"))):
            play.run(f"compare {number}", "report", "--compare", one, other, *EVERY, *words)


_PARTS = 6
CASES: dict[str, Callable[[Play], None]] = {
    **SERVED,
    **{f"story-{name}": partial(story, name=name) for name in (*GOLDEN, *OTHERS)},
    **{f"usages-{part + 1}": partial(usages, part=part, parts=_PARTS) for part in range(_PARTS)},
    **{f"report{form or '--text'}": partial(job_reports, form=form) for form in FORMS},
    **{f"sums{form or '--text'}": partial(sums, form=form) for form in FORMS if form != "--short"},
    "help": helps,
    "tables": tables,
    "configs": configs,
    "pauses": pauses,
    "previews": previews,
    "backfills": backfills,
}
"""By name; those that take longest first."""
