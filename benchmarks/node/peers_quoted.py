"""What others have published of exporters that cannot run beside ours, with the place where they said it.

Owns no measurement: these are other machines, other loads and other days, and are never put into a table of ours.
"""

from benchmarks.group import Table

QUOTED = Table(
    about="Not run here, and not comparable with the above: what others have published.",
    head=("what", "figure", "source"),
    rows=(
        ("dcgm-exporter, working set, 12 nodes of 8 GPUs", "median 484 MiB (417 - 511)",
         "pytorch/ci-infra#1011, 2026-08-13"),
        ("- the same, 8 nodes of one GPU", "median 479 MiB (467 - 491)", "pytorch/ci-infra#1011"),
        ("- pods on nodes of 8 GPUs killed at a limit of 512 MiB", "41 of 86 (48 %); none on smaller nodes",
         "pytorch/ci-infra#1011; laid to GOMAXPROCS of large hosts in #1018"),
        ("- the settings of those", "GOMEMLIMIT 410 MiB, a reading every 60 s", "pytorch/ci-infra#1011, #631"),
        ("- one A10G, no configuration", "400 - 500 MiB", "NVIDIA/dcgm-exporter#609, 2026-01-09"),
        ("- 8 A100s at a limit of 250 MiB", "killed every ten minutes or so",
         "aws-observability/helm-charts#61, 2024-07-12"),
        ("- 3.3.6-3.4.2, mixed nodes", "228 - 230 MiB", "aws-observability/helm-charts#66, 2024-07-17"),
        ("- from 3.3.6-3.4.2 to 3.3.9-3.6.1", "about 200, then 450 MB", "NVIDIA/dcgm-exporter#425, 2024-11-22"),
        ("- 2.3.5-2.6.5, embedded", "135 - 155 MiB", "NVIDIA/gpu-operator#340, 2022-05-05"),
        ("- 3.3.5-3.4.1", "131 % of a core, 248 MiB", "NVIDIA/dcgm-exporter#311, 2024-04-09"),
    ),
)  # fmt: skip
