"""The folded row of Fleet that needs no recording rules: one node, or some, and one Prometheus are a whole product.

Owns its panels, and the columns that say what to do about a leak. Refuses what rules record (`boards.fleet`).
"""

from dashboards import raw, words
from dashboards.parts import Column, Figure, Lines, Panel, Query, Row, Table
from dashboards.series import CLICKED, TO_JOB, TO_NODE, at, in_words, to

LEAK = Column(of="leak", title="Leak", words=words.LEAKS, texts=words.LEAK_NAMES, width=186)
ROLE = Column(of="role", title="Role that acts", texts=words.TEAMS, width=112)
FIX = Column(of="fix", title="Do first", texts=words.FIXES)
_FACTORS = {"gau": "GAU", "ectr": "ECTR", "emfu": "eMFU"}
_IN_TROUBLE = 'state=~"hung|zombie"'
_NOT_HEARD = "no exporter heard"
_HELD = "gpu_efficiency_job_state_gpus"
_TROUBLE = f"(sum by (cluster, job_id, state) ({at(_HELD, _IN_TROUBLE)}) > 0)"
_WHOSE = (
    "* on (cluster, job_id) group_left (name, user, team) topk by (cluster, job_id) (1, count by (cluster, job_id,"
    f" name, user, team) ({at('gpu_efficiency_job_info')})) ^ 0"
)
_PRICE = f"sum by (cluster, job_id, currency) ({at('gpu_efficiency_job_price_per_hour')})"
_SINCE = (
    f"(min by (cluster, job_id) ({at('gpu_efficiency_job_spin_since_timestamp_seconds')})"
    f" or max by (cluster, job_id) ({at('gpu_efficiency_job_last_work_timestamp_seconds')}))"
)
_CULPRIT = 'state="hung",reason="culprit"'
_RANK = (
    f"topk by (cluster, job_id) (1, max by (cluster, job_id, gpu, rank) ({at('gpu_efficiency_allocation_info')}"
    f" and on (cluster, instance, uuid) {at('gpu_efficiency_state', _CULPRIT)}))"
)
_BARE = ", without rules"
SMALL_FLEET = Row(
    "Without recording rules: a small fleet, from what exporters export alone",
    (
        Panel(
            title=f"Useful and its factors{_BARE}",
            kind=Figure(steps=((None, words.EXPECTED),), named=True),
            shows="GAU x ECTR x eMFU and the three factors over the time shown; beside them the kernel utilisation that"
            " nvidia-smi shows. It reads every counter of every node: of more than a few nodes load the recording"
            " rules.",
            bad="useful below 14 %; a wide gap between it and nvidia-smi",
            do="see which factor is lowest, then the largest leak below",
            queries=(
                Query(raw.product(), legend="useful"),
                *(Query(raw.ratio(which), legend=name) for which, name in _FACTORS.items()),
                Query(f"{raw.kernels()} and on () {raw.seconds(raw.OBSERVED)} > 0", legend="nvidia-smi"),
            ),
            unit="percentunit",
            decimals=1,
            width=16,
            height=4,
            empty=_NOT_HEARD,
        ),
        Panel(
            title=f"Paid and lost an hour{_BARE}",
            kind=Figure(steps=((None, words.EXPECTED),), named=True),
            shows="What all GPUs that are heard cost an hour, and how much of it the losses take, now. Without a price"
            " table it is GPU-hours.",
            bad="more than three quarters lost",
            do="begin with the largest leak below",
            queries=(
                Query(raw.money("", time=raw.NOW), legend="paid, {{currency}}"),
                Query(raw.money("", raw.LOST, time=raw.NOW), legend="lost, {{currency}}"),
            ),
            unit="short",
            decimals=2,
            width=8,
            height=4,
            empty=_NOT_HEARD,
        ),
        Panel(
            title=f"Who hangs, and who holds GPUs for nothing{_BARE}",
            kind=Table(
                (
                    Column(of="state", title="State", words=words.STATES, width=85),
                    Column(of="job_id", title="Job", link=TO_JOB, width=180),
                    Column(of="user", title="Owner", width=110),
                    Column(
                        of="team",
                        title="Owner's team",
                        link=to("chargeback", "The team's board", team=CLICKED),
                        width=120,
                    ),
                    Column(of="name", title="Name"),
                    Column(of="A", title="GPUs", unit="none", decimals=0, width=60),
                    Column(of="B", title="An hour", unit="short", decimals=2, bar=words.BAD, width=190),
                    Column(of="currency", title="In", width=60),
                    Column(of="C", title="For", unit="s", decimals=1, width=100),
                    Column(of="gpu", title="Culprit's GPU", width=105),
                    Column(of="rank", title="its rank", width=75),
                ),
                sort="B",
            ),
            shows="Jobs with hung or zombie GPUs: whose they are, what these GPUs cost an hour, for how long they have"
            " been spinning or without work, and of a hang the GPU that does not spin, so that the others wait for it.",
            bad="a row",
            do="call the owner; where nobody answers the platform team can cancel the job. What to do: docs/runbooks/",
            queries=(
                Query(f"{_TROUBLE} {_WHOSE}"),
                Query(
                    f"{_TROUBLE} / on (cluster, job_id) group_left () sum by (cluster, job_id) ({at(_HELD)})"
                    f" * on (cluster, job_id) group_left (currency) {_PRICE}"
                ),
                Query(f"time() - {_SINCE} and on (cluster, job_id) {_TROUBLE}"),
                Query(_RANK),
            ),
            unit="none",
            width=24,
            height=7,
            empty="of what is heard no job hangs, and none is a zombie",
        ),
        Panel(
            title=f"Of 100 GPU-hours{_BARE}",
            kind=Table(
                (
                    LEAK,
                    Column(of="A", title="Of 100 h", unit="none", decimals=1, width=140, bar=words.UNKNOWN),
                    Column(of="B", title="Cost of all", unit="short", decimals=2, width=92),
                    Column(of="currency", title="In", width=60),
                    ROLE,
                    FIX,
                ),
                sort="A",
            ),
            shows="Where 100 paid GPU-hours went over the time shown; all rows together are 100. What all hours of a"
            " row have cost; of a loss which role usually acts, and what it does first.",
            bad="a loss above useful",
            do="give the first loss to who acts on it",
            queries=(
                Query(
                    in_words(
                        "fix",
                        in_words(
                            "role",
                            f"100 * {raw.seconds(by='leak')} / on () group_left () ({raw.seconds()} > 0) > 0",
                        ),
                    )
                ),
                Query(f"{raw.money('', by='leak, currency')} / 3600 > 0"),
            ),
            unit="none",
            width=17,
            height=16,
            empty=_NOT_HEARD,
        ),
        Panel(
            title=f"Nodes with the least use{_BARE}",
            kind=Table(
                (
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="Value", title="Useful", unit="percentunit", decimals=1, bar=words.GOOD, width=190),
                ),
                sort="Value",
                rising=True,
            ),
            shows="Up to twenty nodes by the share of their seen GPU time that was useful over the time shown.",
            bad="nodes at 0 % that are up",
            do="click on the node",
            queries=(
                Query(
                    f"bottomk(20, {raw.ratio('floor', by='cluster, instance')}"
                    f" * on (cluster, instance) group_left (node) {at('gpu_efficiency_node_info')})"
                ),
            ),
            unit="percentunit",
            width=7,
            height=16,
            empty=_NOT_HEARD,
        ),
        Panel(
            title=f"GPUs by what they did{_BARE}",
            kind=Lines(
                stacked=True, colours={words.LAYER_WORDS[layer]: colour for layer, colour in words.LAYERS.items()}
            ),
            shows="All GPUs that were heard, by layer, means of five minutes: useful at the bottom, then what each"
            " lost.",
            bad="a warm or purple band that grows",
            do="choose that time here, and see the leaks above",
            queries=tuple(
                Query(raw.seconds(f'layer="{layer}"', time=raw.NOW), legend=words.LAYER_WORDS[layer])
                for layer in ("useful", "emfu", "ectr", "gau", "unresolved", "unobserved")
            ),
            unit="none",
            width=24,
            height=8,
            empty=_NOT_HEARD,
        ),
    ),
    folded=True,
)
