"""The loads that need PyTorch: matrix products by the vendor's library, and a training step.

Owns which tensors are multiplied and how many operations that takes. Refuses to time anything. Imports the standard
library only: PyTorch is handed in by the child, which runs under the interpreter that has it.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.known.cuda import UnableError, Work
from benchmarks.known.formulas import product_flops, training_flops_per_token, transformer_parameters

SHAPE = {"layers": 8, "hidden": 2048, "heads": 16, "sequence": 1024, "batch": 8, "vocabulary": 32_768}
"""Half a billion weights, 8,192 tokens a step: 25 TFLOP, below 16 GB with all that the backward pass keeps."""
_FP8_SINCE = (8, 9)
"""Compute capability of the first boards with FP8 tensor cores (Ada)."""


def open_torch() -> tuple[Any, str]:
    """Give PyTorch, or None and the reason why it cannot be used."""
    try:
        import torch  # type: ignore[import-not-found]  # noqa: PLC0415  only some interpreters have it
    except ImportError as error:
        return None, f"PyTorch is not installed for this interpreter ({error}): name one with --python"
    if not torch.cuda.is_available():
        return None, f"PyTorch {torch.__version__} cannot use this GPU: torch.cuda.is_available() is False"
    return torch, ""


def product(torch: Any, load: dict[str, Any], *, device: str = "cuda") -> Work:
    """Multiply two square matrices of `size`, of the load's dtype, with random contents."""
    size = load["size"]
    launch = _FP8(torch, size, device) if load["dtype"] == "fp8" else _plain(torch, load["dtype"], size, device)
    return Work(launch, flops=product_flops(size, size, size), free=_emptying(torch))


def _plain(torch: Any, dtype: str, size: int, device: str) -> Callable[[], object]:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}[dtype]
    torch.set_float32_matmul_precision("high")  # TF32 for float32; the others do not look at it
    left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=kind)
    return lambda: torch.mm(left, right, out=out)


def _FP8(torch: Any, size: int, device: str) -> Callable[[], object]:  # noqa: N802  the type's name
    """The operands' scales are one; the second operand is column-major, as the hardware wants it."""
    if device == "cuda" and torch.cuda.get_device_capability() < _FP8_SINCE:
        raise UnableError("this board has no FP8 tensor cores")
    if not hasattr(torch, "_scaled_mm"):
        raise UnableError(f"PyTorch {torch.__version__} has no FP8 product")
    left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(  # noqa: SLF001  PyTorch gives FP8 products by this name alone
        left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def transformer(
    torch: Any, _load: dict[str, Any], *, device: str = "cuda", shape: dict[str, int] | None = None
) -> Work:
    """Train a small decoder on random tokens in BF16: forward, backward and a plain SGD step.

    Attention is not causal, so that the formula's second term holds in full.
    """
    shape = shape or SHAPE
    size, tokens = shape["hidden"], shape["batch"] * shape["sequence"]
    weights = _weights(torch, shape, device)
    words = torch.randint(shape["vocabulary"], (shape["batch"], shape["sequence"] + 1), device=device)

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(
            _forward(torch, weights, words[:, :-1], shape["heads"]).flatten(0, 1).float(), words[:, 1:].flatten()
        )
        loss.backward()
        with torch.no_grad():
            torch._foreach_add_(weights, [weight.grad for weight in weights], alpha=-1e-4)
        for weight in weights:
            weight.grad = None

    parameters = transformer_parameters(layers=shape["layers"], hidden=size, vocabulary=shape["vocabulary"])
    per_token = training_flops_per_token(
        parameters,
        layers=shape["layers"],
        heads=shape["heads"],
        head_size=size // shape["heads"],
        sequence=shape["sequence"],
    )
    return Work(step, flops=per_token * tokens, free=_emptying(torch))


def _weights(torch: Any, shape: dict[str, int], device: str) -> list[Any]:
    """The embedding, four matrices a layer (attention in, attention out, MLP up, MLP down), the head."""
    width, words = shape["hidden"], shape["vocabulary"]
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    sizes = [(words, width), *layer * shape["layers"], (width, words)]
    return [
        (torch.randn(*size, device=device) / width**0.5).to(torch.bfloat16).requires_grad_(True)  # noqa: FBT003
        for size in sizes
    ]


def _forward(torch: Any, weights: list[Any], words: Any, heads: int) -> Any:
    of = torch.nn.functional
    embedding, *layers, head = weights
    stream = of.embedding(words, embedding)
    batch, length, width = stream.shape
    for first in range(0, len(layers), 4):
        inward, outward, up, down = layers[first : first + 4]
        mixed = of.layer_norm(stream, (width,)) @ inward
        parts = mixed.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        attended = of.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, length, width)
        stream = stream + attended @ outward
        stream = stream + of.gelu(of.layer_norm(stream, (width,)) @ up) @ down
    return of.layer_norm(stream, (width,)) @ head


def _emptying(torch: Any) -> Callable[[], None]:
    """The tensors go with their last reference; this gives the memory behind them back to the driver."""
    empty: Callable[[], None] = torch.cuda.empty_cache
    return empty


KINDS: dict[str, Callable[[Any, dict[str, Any]], Work]] = {"product": product, "transformer": transformer}
