"""A stand-in for PyTorch: what a matrix product of `benchmarks/known/torch.py` asks of it, and nothing else.

Written by hand, checked against PyTorch 2.15 on a processor. It multiplies nothing; it refuses what PyTorch would:
operands of other shapes or types than the product's, and an FP8 operand that is not column-major.
"""

from types import SimpleNamespace
from typing import Any

print("a library that talks")  # noqa: T201  on the stream the child answers on

__version__ = "0.0 stand-in"
bfloat16, float16, float32, float8_e4m3fn = "bfloat16", "float16", "float32", "float8_e4m3fn"
cuda = SimpleNamespace(
    is_available=lambda: True,
    get_device_capability=lambda: (9, 0),
    empty_cache=lambda: None,
    is_initialized=lambda: True,
)


class Tensor:
    def __init__(self, shape: tuple[int, ...], dtype: str, *, row_major: bool = True) -> None:
        self.shape, self.dtype, self.row_major = shape, dtype, row_major

    def to(self, dtype: str) -> "Tensor":
        return Tensor(self.shape, dtype, row_major=self.row_major)

    def t(self) -> "Tensor":
        return Tensor(self.shape[::-1], self.dtype, row_major=not self.row_major)


def randn(*shape: int, device: str) -> Tensor:
    assert device == "cuda"
    return Tensor(shape, float32)


def empty(*shape: int, device: str, dtype: str) -> Tensor:
    assert device == "cuda"
    return Tensor(shape, dtype)


def ones(_shape: tuple[()], *, device: str) -> Tensor:
    assert device == "cuda"
    return Tensor((), float32)


def set_float32_matmul_precision(precision: str) -> None:
    assert precision == "high"


def mm(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    assert left.dtype == right.dtype == out.dtype
    assert (left.shape[1], (left.shape[0], right.shape[1])) == (right.shape[0], out.shape)
    return out


def _scaled_mm(left: Tensor, right: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: str, **_: Any) -> Tensor:
    assert left.dtype == right.dtype == float8_e4m3fn
    assert left.row_major and not right.row_major  # noqa: PT018  PyTorch refuses either
    assert scale_a.shape == scale_b.shape == ()
    return Tensor((left.shape[0], right.shape[1]), out_dtype)
