"""Lines of training logs in the formats that the frameworks publish; see the followers' modules for the sources."""

from typing import Any

RED, GREEN, RESET = "\033[31m", "\033[32m", "\033[39m"


def megatron(step: int, *, ms: float, dialect: str = "core", **more: Any) -> str:
    """`training_log`: dialects 2019 (no throughput), core (2024), dated (2025), deepspeed."""
    batch, loss, tflops, nan = more.get("batch", 128), more.get("loss", 1.818812), more.get("tflops", 243.6), 0
    line = f" iteration {step:8d}/{more.get('total', 1000):8d} | consumed samples: {step * batch:12d} |"
    if dialect == "dated":
        line = f" [{more.get('stamp', '2025-04-06 03:02:12.123456')}]{line} skipped samples: {64:12d} |"
    line += f" elapsed time per iteration (ms): {ms:.1f} |"
    if dialect in ("core", "dated") and tflops is not None:
        line += f" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |"
    if dialect == "dated":
        line += f" energy per GPU (J/iter/GPU): {1234.5:.1f} | power per GPU (W/GPU): {640.2:.1f} |"
    line += f" learning rate: {1.42e-05:.6E} | global batch size: {batch:5d} |"
    if loss is None:
        nan = 1
    else:
        line += f" lm loss: {loss:.6E} |"
    line += f" load_balancing_loss: {1.013377:.6f} |" if dialect == "core" else ""
    line += f" loss scale: {1.0:.1f} | grad norm: {1.3:.3f} | number of skipped iterations: {nan:3d} |"
    line += f" number of nan iterations: {nan:3d} |"
    if dialect == "deepspeed":
        line += f" samples per second: {23.9:.3f} | TFLOPs: {tflops:.2f} |"
    return line


def megatron_start(*, world: int = 16, sequence: int = 4096) -> list[str]:
    """What rank 0 prints before training."""
    table = {
        "bf16": True, "context_parallel_size": 1, "expert_model_parallel_size": 1, "fp8": None,
        "recompute_granularity": "full", "seq_length": sequence, "virtual_pipeline_model_parallel_size": 2,
        "world_size": world,
    }  # fmt: skip
    sizes = f"using world size: {world}, data-parallel size: {world // 8}, context-parallel size: 1, hierarchical"
    return [
        f"{sizes} context-parallel sizes: None, tensor-model-parallel size: 2, pipeline-model-parallel size: 4",
        "------------------------ arguments ------------------------",
        *(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in table.items()),
        "-------------------- end of arguments ---------------------",
        "setting number of microbatches to constant 8",
    ]


def titan(step: int, *, tps: int, dialect: str = "2025", **more: Any) -> str:
    """`MetricsProcessor.log`: dialects 2024 (wps), early2025 (no grad_norm), 2025, with `color`."""
    red, green, reset = (RED, GREEN, RESET) if more.get("color") else ("", "", "")
    loss, tflops, mfu = more.get("loss", 6.1384), more.get("tflops", 339.16), more.get("mfu", 34.29)
    line = f"{red}step: {step:2}  {green}loss: {loss:7.4f}  "
    line += f"grad_norm: {0.8319:7.4f}  " if dialect == "2025" else ""
    line += f"memory: {49.66:5.2f}GiB({52.28:.2f}%)  "
    line += f"wps: {tps:,}  " if dialect == "2024" else f"tps: {tps:,}  tflops: {tflops:,.2f}  "
    return stamped(f"{line}mfu: {mfu:.2f}%{reset}", more.get("stamp", "2025-06-16 22:30:50,322"))


def stamped(text: str, stamp: str) -> str:
    """As torchtitan's logger writes it."""
    return f"[titan] {stamp} - root - INFO - {text}"


def maxtext(step: int, *, seconds: float, dialect: str = "2026", **more: Any) -> str:
    """`_log_training_metrics`: dialects 2023, 2025, 2026; `step` counts from 0."""
    line = f"completed step: {step}, seconds: {seconds:.3f}, TFLOP/s/device: {more.get('tflops', 123.456):.3f}, "
    if dialect == "2023":
        return f"{line}loss: {more.get('loss', 8.921):.3f}"
    line += f"Tokens/s/device: {more.get('tokens', 4096.0):.3f}, total_weights: {more.get('weights', 65536)}, "
    line += f"loss: {more.get('loss', 8.921):.3f}"
    return line if dialect == "2025" else f"{line}, lm_loss: {8.8:.3f}, perplexity: {6634.2:.3f}"


NO_TUNING = "Config param use_sft: False"
"""As MaxText's pyconfig lists it: all tokens but padding have a weight."""


def nanotron(step: int, *, ms: str, dialect: str = "2025", **more: Any) -> str:
    """`train_step_logs`: dialects 2023 (plain numbers), 2024 (K, M, G), 2025 (another order)."""
    stamp = more.get("stamp", "10/17/2025 16:31:56")
    tokens, loss, tflops = more.get("tokens", "11.4K"), more.get("loss", "2.38"), more.get("tflops", "38.3")
    head = f"{stamp} [INFO|DP=0|PP=0|TP=0|ip-26-0]: iteration: {step} / 378950 | "
    if dialect == "2023":
        return (
            f"{head}consumed_samples: {step * 64:12d} | elapsed_time_per_iteration_ms: {ms} | tokens_per_sec:"
            f" 2.280000E+04 | tokens_per_sec_per_gpu: {tokens} | global_batch_size:    64 | lm_loss: {loss} | lr:"
            f" 1.000E-05 | model_tflops_per_gpu: {tflops} | hardware_tflops_per_gpu: 40.20 | grad_norm: 1.250"
        )
    if dialect == "2025":
        return (
            f"{head}consumed_tokens: 123K | time_per_iteration_ms: {ms} | tokens_per_sec: 22.8K |"
            f" tokens_per_sec_per_gpu: {tokens} | global_batch_size: 1.02K | grad_norm: 5.99M | lr: 0.00019 | lm_loss:"
            f" {loss} | model_tflops_per_gpu: {tflops} | hardware_tflops_per_gpu: 40.2"
        )
    return (
        f"{head}consumed_tokens: 85.8G | elapsed_time_per_iteration_ms: {ms} | tokens_per_sec: 22.8K |"
        f" tokens_per_sec_per_gpu: {tokens} | global_batch_size: 64 | lm_loss: {loss} | lr: 1e-05 |"
        f" model_tflops_per_gpu: {tflops} | hardware_tflops_per_gpu: 40.2 | grad_norm: 1.25"
    )


def bar(step: int, total: int, *, elapsed: str = "00:30") -> str:
    """tqdm's bar, which begins with a carriage return and ends with nothing."""
    share = 100 * step // total
    return f"\r{share:3d}%|{'█' * (share // 10)}{' ' * (10 - share // 10)}| {step}/{total} [{elapsed}<04:30,  1.66it/s]"


def trainer(*, loss: float, epoch: float, text: bool = False) -> str:
    """What ProgressCallback writes; `text`: as transformers 5 does."""
    logs: dict[str, Any] = {"loss": loss, "grad_norm": 2.5, "learning_rate": 5e-05, "epoch": epoch}
    return str({key: f"{value:.4g}" for key, value in logs.items()} if text else logs)
