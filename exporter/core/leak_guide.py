"""Describes twelve well-known leaks: texts, expected ranges, literature, and the rows of LEAKS that book each.

`gpu-efficiency leaks`, docs/leaks.md and dashboards derive from it; reports have the texts of LEAKS.
"""

from collections.abc import Mapping

from msgspec import Struct

from exporter.core.leaks import LEAKS

EVIDENCE_KINDS = ("measured", "reported", "engine", "estimated")
"""Kinds of evidence: hardware counters and the scheduler; workload reports; a serving engine; a formula."""


class Citation(Struct, frozen=True):
    """A published figure, measured on the authors' own system; no range below is copied from one."""

    work: str
    """Who, when and where."""
    figure: str


class ExpectedLoss(Struct, frozen=True):
    """Hours lost of 100 paid, an engineering estimate (E): most fleets should lie between `low` and `high`."""

    low: float
    high: float
    sources: tuple[str, ...] = ()
    """Keys of LITERATURE on which the estimate is based; empty: judgement alone."""


class LeakGuideEntry(Struct, frozen=True):
    """One of the twelve leaks."""

    number: int
    name: str
    layers: tuple[str, ...]
    """Layers of its rows, in the order of the rows; the first is the main layer."""
    team: str
    rows: tuple[str, ...]
    """Rows of LEAKS that book it; no row belongs to two leaks."""
    watch: str
    """The metric to watch, in words."""
    series: tuple[str, ...]
    """Metrics or recording rules that show it, some with label selectors."""
    evidence: tuple[str, ...]
    """Kinds of evidence (EVIDENCE_KINDS) on which it is booked."""
    needs: str
    """Data sources required to detect it."""
    training: ExpectedLoss | None
    inference: ExpectedLoss | None
    """Expected losses; None: does not occur in this workload."""
    runbook: str = ""
    """Alert whose runbook in docs/runbooks covers it."""

    @property
    def fix(self) -> str:
        """The first remedy of each of its rows, as LEAKS has it; with the row's name where there are several."""
        if len(self.rows) == 1:
            return _FIX_OF[self.rows[0]]
        return ". ".join(f"{row}: {_FIX_OF[row]}" for row in self.rows)


class OtherLeak(Struct, frozen=True):
    """A row of LEAKS that belongs to none of the twelve."""

    row: str
    training: ExpectedLoss
    inference: ExpectedLoss
    runbook: str = ""


_FIX_OF = {leak.name: leak.fix for leak in LEAKS}
_SHARE = "job_leak:gpu_efficiency_share:ratio_rate5m"

LEAK_GUIDE: tuple[LeakGuideEntry, ...] = (
    LeakGuideEntry(1, "memory-bound and low-parallelism kernels", ("emfu",), "model",
        rows=("memory_bound", "low_parallelism"),
        watch="arithmetic intensity and memory bandwidth use",
        series=(
            "job:gpu_efficiency_arithmetic_intensity:flops_per_byte",
            "job:gpu_efficiency_dram_active:ratio_rate5m",
        ),
        evidence=("measured",), needs="tensor, SM and DRAM counters",
        training=ExpectedLoss(10, 30, ("ivanov2021", "llama2024")),
        inference=ExpectedLoss(20, 55, ("pope2022", "roofline"))),
    LeakGuideEntry(2, "idle allocation", ("gau",), "platform",
        rows=("idle_allocation",),
        watch="unoccupied share of the observed GPU-hours (1 - GAU); this leak's share of the paid GPU-hours",
        series=(
            "cluster:gpu_efficiency_unoccupied:ratio_rate5m",
            'cluster_leak:gpu_efficiency_share:ratio_rate5m{leak="idle_allocation"}',
            "job:gpu_efficiency_cost_idle:per_hour",
        ),
        evidence=("measured", "engine", "estimated"),
        needs="the scheduler and hardware counters; for servers also the serving engine's metrics",
        training=ExpectedLoss(5, 20, ("kokolis2024", "weng2023")),
        inference=ExpectedLoss(10, 40, ("xiang2025",)),
        runbook="GPUEfficiencyGPUZombie"),
    LeakGuideEntry(3, "oversized allocation", ("gau",), "scheduling",
        rows=("oversized_allocation",),
        watch="the memory and compute that a job uses, and the smallest MIG slice that would hold it",
        series=(
            "job:gpu_efficiency_fitting_slice:ratio",
            "job:gpu_efficiency_memory_used:bytes",
            "job:gpu_efficiency_ofu:ratio_rate5m",
        ),
        evidence=("estimated",), needs="hardware counters; only jobs on one GPU are judged",
        training=ExpectedLoss(0, 5), inference=ExpectedLoss(2, 20, ("xiang2025",)),
        runbook="GPUEfficiencyGPUOversized"),
    LeakGuideEntry(4, "host overhead (CPU-bound launching)", ("ectr",), "training",
        rows=("host_overhead",),
        watch="share of time in which small kernels wait for the CPU to launch them",
        series=(f'{_SHARE}{{leak="host_overhead"}}',),
        evidence=("estimated",),
        needs="SM and graphics-engine activity once a second; 30-second averages, a dcgm-exporter's default, are too"
        " coarse",
        training=ExpectedLoss(1, 10), inference=ExpectedLoss(3, 25, ("vllm2024", "sglang2024"))),
    LeakGuideEntry(5, "failures and recovery", ("ectr", "emfu"), "training",
        rows=("hung", "failure_recovery", "checkpoint", "rework"),
        watch="time to detect, time to recover, repeated steps, goodput (from counters, and as the job reports it)",
        series=(
            'cluster_state:gpu_efficiency_time_to_detect:mean_seconds_1d{state="hung"}',
            "cluster:gpu_efficiency_time_to_recover:mean_seconds_1d",
            "job:gpu_efficiency_goodput:ratio",
            "job:gpu_efficiency_reported_goodput:ratio",
            "job:gpu_efficiency_progress:ratio",
        ),
        evidence=("measured", "reported", "estimated"),
        needs="hardware counters for hangs; the scheduler for restarts; the job's report for restores and repeated"
        " steps; for checkpoints the job's report, or else an estimate",
        training=ExpectedLoss(2, 12, ("llama2024", "hu2024", "kokolis2024")), inference=ExpectedLoss(0, 3),
        runbook="GPUEfficiencyJobDeadlocked"),
    LeakGuideEntry(6, "exposed communication", ("ectr",), "training",
        rows=("exposed_communication",),
        watch="time in communication that no computation hides",
        series=(f'{_SHARE}{{leak="exposed_communication"}}', "job_rank:gpu_efficiency_straggler"),
        evidence=("reported", "estimated"), needs="the job's report, or else an estimate from link and SM counters",
        training=ExpectedLoss(3, 20, ("deepseek2024", "megascale2024")), inference=ExpectedLoss(1, 10),
        runbook="GPUEfficiencyStragglerRank"),
    LeakGuideEntry(7, "pipeline bubbles", ("emfu",), "training",
        rows=("pipeline_bubble",),
        watch="share of a step in which a pipeline stage has nothing to compute",
        series=("job:gpu_efficiency_bubble:ratio", f'{_SHARE}{{leak="pipeline_bubble"}}'),
        evidence=("reported", "estimated"),
        needs="the job's report: its stages, microbatches and schedule, or the time in phase `bubble`. Without a report"
        " it is estimated if several stages run on one node, from GPUs that wait in turn or, where the readings are too"
        " long to show that, poll equally long while hardly any data moves",
        training=ExpectedLoss(0, 12, ("narayanan2021",)), inference=ExpectedLoss(0, 2)),
    LeakGuideEntry(8, "recomputation", ("emfu",), "training",
        rows=("recomputation",),
        watch="hardware FLOPs utilization less model FLOPs utilization (HFU - MFU)",
        series=("job:gpu_efficiency_hfu_mfu_gap:ratio_rate5m",),
        evidence=("reported",), needs="the job's report: model FLOPs, and which recomputation it uses",
        training=ExpectedLoss(0, 15, ("korthikanti2022", "palm2022")), inference=None),
    LeakGuideEntry(9, "KV-cache pressure", ("ectr", "emfu"), "serving",
        rows=("kv_cache_wait", "kv_cache_pressure"),
        watch="KV-cache use, preemptions, tokens computed twice",
        series=(
            "job:gpu_efficiency_kv_cache:ratio",
            "job:gpu_efficiency_preemptions:rate5m",
            "job:gpu_efficiency_recomputed_tokens:rate5m",
        ),
        evidence=("engine",), needs="the serving engine's metrics",
        training=None, inference=ExpectedLoss(1, 10, ("kwon2023",))),
    LeakGuideEntry(10, "prefill-decode interference", ("ectr",), "serving",
        rows=("prefill_decode_interference",),
        watch="latency that prefills add: inter-token p99 and time to first token",
        series=(
            'job:gpu_efficiency_latency:seconds{kind="itl",percentile="p99"}',
            'job:gpu_efficiency_latency:seconds{kind="ttft"}',
        ),
        evidence=("engine",), needs="the serving engine's metrics",
        training=None, inference=ExpectedLoss(1, 10, ("agrawal2024", "zhong2024"))),
    LeakGuideEntry(11, "under-filled batches", ("ectr",), "serving",
        rows=("batching",),
        watch="batch fill, together with the queue delay",
        series=(
            "job:gpu_efficiency_batch_fill:ratio",
            'job:gpu_efficiency_latency:seconds{kind="queue"}',
            'job_state:gpu_efficiency_requests{state="waiting"}',
        ),
        evidence=("engine",), needs="the serving engine's metrics",
        training=None, inference=ExpectedLoss(2, 20, ("yu2022",))),
    LeakGuideEntry(12, "rejected speculative decoding", ("emfu",), "serving",
        rows=("rejected_speculation",),
        watch="draft acceptance and tokens per forward pass; where speculative decoding is not used, the last of these"
        " series grows if it might help",
        series=(
            "job:gpu_efficiency_draft_acceptance:ratio_rate5m",
            "job:gpu_efficiency_tokens_per_pass:ratio_rate5m",
            'job:gpu_efficiency_advice_seconds:rate5m{advice="speculative_decoding"}',
        ),
        evidence=("engine",),
        needs="the serving engine's metrics",
        training=None, inference=ExpectedLoss(0, 5, ("leviathan2023",))),
)  # fmt: skip

OTHER_LEAKS: tuple[OtherLeak, ...] = (
    OtherLeak(
        "unavailable",
        ExpectedLoss(0, 5, ("cui2025",)),
        ExpectedLoss(0, 5, ("cui2025",)),
        runbook="GPUEfficiencyGPULost",
    ),
    OtherLeak("startup", ExpectedLoss(0, 5), ExpectedLoss(0, 8)),
    OtherLeak("data_stall", ExpectedLoss(1, 15, ("mohan2021",)), ExpectedLoss(0, 2)),
    OtherLeak("unattributed_stall", ExpectedLoss(0, 10), ExpectedLoss(0, 10)),
    OtherLeak("other_compute", ExpectedLoss(1, 10), ExpectedLoss(0, 10)),
    OtherLeak("throttled", ExpectedLoss(0, 5), ExpectedLoss(0, 5), runbook="GPUEfficiencyGPUThrottledCostly"),
    OtherLeak("padding", ExpectedLoss(0, 10, ("krell2021",)), ExpectedLoss(0, 5)),
)
"""The other rows of LEAKS, in its order."""

EXPECTED_USEFUL: Mapping[str, ExpectedLoss] = {
    "training": ExpectedLoss(15, 50, ("llama2024", "megascale2024", "palm2022")),
    "inference": ExpectedLoss(3, 30, ("pope2022", "roofline")),
}
"""Expected useful hours of 100 paid: work on the model at full tensor peak."""

LITERATURE: Mapping[str, Citation] = {
    "agrawal2024": Citation("Agrawal et al. 2024, Sarathi-Serve, OSDI",
        "Mistral-7B on an A100: with chunked prefills 2.6 times the load of vLLM at the same latency target"),
    "cui2025": Citation("Cui et al. 2025, GPU failures on Delta, arXiv 2503.11901",
        "a cluster would need 5 to 20 % spare GPUs to cover failures"),
    "deepseek2024": Citation("DeepSeek-AI 2024, DeepSeek-V3",
        "without overlap, expert parallelism across nodes takes about as long (1 to 1) to communicate as to compute"),
    "hu2024": Citation("Hu et al. 2024, Acme, NSDI, and its published trace",
        "failed jobs took 12.4 % of the GPU time in cluster Seren and 8.0 % in Kalos"),
    "ivanov2021": Citation("Ivanov et al. 2021, Data Movement Is All You Need, MLSys",
        "in a BERT layer, operators with 0.2 % of the FLOPs take 39 % of the time"),
    "kokolis2024": Citation("Kokolis et al. 2024, Revisiting Reliability, HPCA 2025",
        "24,000 A100, 11 months: more than 80 % of them in use; a job of 1,024 GPUs fails every 7.9 h on average"),
    "korthikanti2022": Citation("Korthikanti et al. 2022, Reducing Activation Recomputation, MLSys 2023",
        "a 530B model: MFU 42.1 % with full recomputation, 54.2 % when nearly all of it is avoided"),
    "krell2021": Citation("Krell et al. 2021, Efficient Sequence Packing, arXiv 2107.02027",
        "up to 50 % of the tokens of BERT's training on Wikipedia are padding"),
    "kwon2023": Citation("Kwon et al. 2023, PagedAttention (vLLM), SOSP",
        "without paging, 20.4 to 38.2 % of the KV cache's memory holds tokens; with paging, throughput is 2 to 4"
        " times as high"),
    "leviathan2023": Citation("Leviathan et al. 2023, Speculative Decoding, ICML",
        "decoding becomes 2 to 3 times as fast; (1 - a^(n+1)) / (1 - a) tokens per pass, at acceptance a and n drafted"
        " tokens"),
    "llama2024": Citation("Llama team, Meta 2024, The Llama 3 Herd of Models",
        "405B on 16,384 H100: MFU 38 to 43 %; 466 interruptions in 54 days, effective training time above 90 %"),
    "megascale2024": Citation("Jiang et al. 2024, MegaScale, NSDI",
        "MFU 55.2 % of a 175B model on 12,288 GPUs, 1.34 times that of Megatron-LM"),
    "mohan2021": Citation("Mohan et al. 2021, Data Stalls in DNN Training, VLDB",
        "vision and audio models: waiting for input often dominates; without it, training on one server is up to 5"
        " times as fast"),
    "narayanan2021": Citation("Narayanan et al. 2021, Megatron-LM on GPU clusters, SC",
        "the bubble takes (p-1)/(v*m) of the ideal time, for p stages, m microbatches and v chunks per stage: 10.9 %"
        " for p = 8, m = 64, v = 1"),
    "palm2022": Citation("Chowdhery et al. 2022, PaLM",
        "a 540B model: HFU 57.8 %, MFU 46.2 %; the 11.6 points between them are recomputation"),
    "pope2022": Citation("Pope et al. 2022, Efficiently Scaling Transformer Inference, MLSys 2023",
        "PaLM 540B: MFU at most 76 %, in prefill with large batches"),
    "roofline": Citation("Arithmetic, from the H100's 989.4 TFLOP/s dense and 3.35 TB/s",
        "decoding reads each 16-bit weight once per batch, for 2 FLOPs per sequence: memory is the limit below 295"
        " sequences per batch; a batch of 32 reaches 11 % of the peak"),
    "sglang2024": Citation("SGLang team 2024, SGLang v0.4, blog",
        "a serving engine spends up to 50 % of its time on CPU work that does not overlap GPU work"),
    "vllm2024": Citation("vLLM team 2024, vLLM v0.6.0, blog",
        "vLLM 0.5, Llama 3 8B on one H100: 33 % of the time in the API server, 29 % in scheduling"),
    "weng2023": Citation("Weng et al. 2023, Beware of Fragmentation, ATC",
        "with better placement up to 49 % fewer GPUs stay unallocated, in a cluster of more than 6,200 GPUs"),
    "xiang2025": Citation("Xiang et al. 2025, Aegaeon, SOSP",
        "on a platform that serves many models, 17.7 % of the GPUs serve 1.35 % of the requests; pooled, 213 GPUs do"
        " the work of 1,192"),
    "yu2022": Citation("Yu et al. 2022, Orca, OSDI",
        "GPT-3 175B: with batching by iteration, 36.9 times the throughput of FasterTransformer at the same latency"),
    "zhong2024": Citation("Zhong et al. 2024, DistServe, OSDI",
        "with prefill and decode on separate GPUs, up to 7.4 times the requests within the same latency targets"),
}  # fmt: skip

EXAMPLE_WATERFALLS: Mapping[str, Mapping[str, int]] = {
    "training": {
        "unavailable": 2, "idle_allocation": 10, "oversized_allocation": 1,
        "hung": 1, "failure_recovery": 2, "startup": 1, "checkpoint": 2, "data_stall": 4, "host_overhead": 4,
        "unattributed_stall": 1, "exposed_communication": 9,
        "pipeline_bubble": 5, "memory_bound": 13, "low_parallelism": 7, "other_compute": 2, "throttled": 1,
        "recomputation": 5, "padding": 1, "rework": 1,
        "useful": 28,
    },
    "inference": {
        "unavailable": 1, "idle_allocation": 25, "oversized_allocation": 6,
        "failure_recovery": 1, "startup": 2, "kv_cache_wait": 2, "batching": 6, "host_overhead": 5,
        "exposed_communication": 3, "prefill_decode_interference": 4,
        "memory_bound": 26, "low_parallelism": 5, "other_compute": 1, "throttled": 1,
        "rejected_speculation": 1, "kv_cache_pressure": 1,
        "useful": 10,
    },
}  # fmt: skip
"""Examples (E, not measured) of how 100 paid GPU-hours divide into rows of LEAKS and useful hours.

Ordered by layer, then as in LEAKS; missing rows are 0.
"""
