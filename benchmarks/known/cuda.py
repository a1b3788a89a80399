"""The loads that need the driver alone: `libcuda.so.1` through ctypes, and the kernels of `known.ptx`.

Owns the context (the device's primary one, which PyTorch shares), memory and launches. Refuses to time anything.
Imports the standard library only, for it runs in the child.

Signatures follow the CUDA Driver API reference; a device address is an unsigned 64-bit number there (CUdeviceptr).
"""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from benchmarks.known.formulas import copy_bytes, mma_kernel_flops
from benchmarks.known.ptx import MMA_PER_ROUND, program

MULTIPROCESSORS = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""
COPY_BYTES = 1 << 29
"""Far beyond any board's L2 cache, so that every byte comes from memory and goes there."""
SPIN_NS, SMALL_NS = 50_000_000, 50_000
"""How long one spin and one small kernel last: the small one is long beside the microsecond between two kernels."""
_MMA_THREADS, _MMA_BLOCKS_PER_SM, _MMA_ROUNDS = 256, 2, 20_000
_COPY_THREADS, _COPY_BLOCKS_PER_SM = 512, 4
_VECTOR = 16


class UnableError(Exception):
    """This load cannot run here; the message says why."""


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Work:
    """Something to launch again and again, and what is known of one launch."""

    launch: Callable[[], object]
    flops: float = 0.0
    bytes: float = 0.0
    free: Callable[[], object] = _nothing


class Cuda:
    """One device through the driver. `library` is `libcuda.so.1`; raises UnableError in the driver's words."""

    def __init__(self, library: Any) -> None:
        self._library = library
        _declare(library)
        self._call("cuInit", 0)
        device, context, module = c_int(), c_void_p(), c_void_p()
        self._call("cuDeviceGet", byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuModuleLoadData", byref(module), program().encode())
        self._module = module
        count = c_int()
        self._call("cuDeviceGetAttribute", byref(count), MULTIPROCESSORS, device)
        self.multiprocessors = count.value

    def synchronize(self) -> None:
        """Wait until all that was launched is done. Raises UnableError when a kernel failed."""
        self._call("cuCtxSynchronize")

    def kernel(self, name: str, *arguments: int, blocks: int, threads: int) -> Callable[[], None]:
        """Give what launches a kernel whose parameters are all 64 bits wide."""
        function = c_void_p()
        self._call("cuModuleGetFunction", byref(function), self._module, name.encode())
        values = [c_uint64(argument) for argument in arguments]
        packed = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))

        def launch(_held: object = values) -> None:
            self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, None, packed, None)

        return launch

    def memory(self, size: int) -> int:
        """Allocate `size` bytes, all zero, and give their address."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), size)
        self._call("cuMemsetD8_v2", address, 0, size)
        return address.value

    def free(self, *addresses: int) -> None:
        """Give memory back."""
        for address in addresses:
            self._call("cuMemFree_v2", address)

    def copy(self, source: int, target: int, size: int) -> None:
        """Copy within the device, behind what was launched before."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, None)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise UnableError(f"libcuda: {name}: {self._words(code)} (error {code})")

    def _words(self, code: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorString(code, byref(text))
        return (text.value or b"unknown").decode()


def open_cuda() -> Cuda:
    """Load the driver's library. Raises UnableError when there is none, or no device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnableError(
            f"libcuda.so.1 could not be loaded ({error}): is this node's driver installed for compute?"
        ) from error
    return Cuda(library)


def spin(cuda: Cuda, load: dict[str, Any]) -> Work:
    """Poll on `blocks` blocks (0: two on every SM) and do nothing else."""
    return _spin(cuda, load, SPIN_NS)


def small(cuda: Cuda, load: dict[str, Any]) -> Work:
    """Poll for a moment on few blocks: a small kernel whose length is known."""
    return _spin(cuda, load, SMALL_NS)


def _spin(cuda: Cuda, load: dict[str, Any], nanoseconds: int) -> Work:
    word = cuda.memory(4)
    blocks = load["blocks"] or 2 * cuda.multiprocessors
    return Work(cuda.kernel("spin", nanoseconds, word, blocks=blocks, threads=32), free=lambda: cuda.free(word))


def copy(cuda: Cuda, _load: dict[str, Any]) -> Work:
    """Copy as the driver does it."""
    source, target = cuda.memory(COPY_BYTES), cuda.memory(COPY_BYTES)
    return Work(
        lambda: cuda.copy(source, target, COPY_BYTES),
        bytes=copy_bytes(COPY_BYTES),
        free=lambda: cuda.free(source, target),
    )


def copy_kernel(cuda: Cuda, _load: dict[str, Any]) -> Work:
    """Copy by a kernel of our own, on the SMs."""
    source, target = cuda.memory(COPY_BYTES), cuda.memory(COPY_BYTES)
    blocks = _COPY_BLOCKS_PER_SM * cuda.multiprocessors
    launch = cuda.kernel("copy", source, target, COPY_BYTES // _VECTOR, blocks=blocks, threads=_COPY_THREADS)
    return Work(launch, bytes=copy_bytes(COPY_BYTES), free=lambda: cuda.free(source, target))


def mma(cuda: Cuda, _load: dict[str, Any]) -> Work:
    """Multiply in registers: tensor work without memory."""
    blocks = _MMA_BLOCKS_PER_SM * cuda.multiprocessors
    out = cuda.memory(4 * blocks * _MMA_THREADS)
    launch = cuda.kernel("mma", _MMA_ROUNDS, out, blocks=blocks, threads=_MMA_THREADS)
    flops = mma_kernel_flops(blocks=blocks, threads=_MMA_THREADS, rounds=_MMA_ROUNDS, per_round=MMA_PER_ROUND)
    return Work(launch, flops=flops, free=lambda: cuda.free(out))


KINDS: dict[str, Callable[[Cuda, dict[str, Any]], Work]] = {
    "spin": spin,
    "storm": small,
    "copy": copy,
    "copy_kernel": copy_kernel,
    "mma": mma,
}


def _declare(library: Any) -> None:
    """Without these, ctypes would pass a 64-bit address as a 32-bit number."""
    pointer, address = ctypes.POINTER, c_uint64
    signatures: dict[str, list[Any]] = {
        "cuInit": [c_uint],
        "cuDeviceGet": [pointer(c_int), c_int],
        "cuDeviceGetAttribute": [pointer(c_int), c_int, c_int],
        "cuDevicePrimaryCtxRetain": [pointer(c_void_p), c_int],
        "cuCtxSetCurrent": [c_void_p],
        "cuCtxSynchronize": [],
        "cuModuleLoadData": [pointer(c_void_p), c_char_p],
        "cuModuleGetFunction": [pointer(c_void_p), c_void_p, c_char_p],
        "cuMemAlloc_v2": [pointer(address), c_size_t],
        "cuMemFree_v2": [address],
        "cuMemsetD8_v2": [address, c_ubyte, c_size_t],
        "cuMemcpyDtoDAsync_v2": [address, address, c_size_t, c_void_p],
        "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
        "cuGetErrorString": [c_int, pointer(c_char_p)],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
