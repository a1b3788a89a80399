"""Chooses the pipe whose activity is a job's useful work: the tensor cores', else FP64 or FP32, else none that counts.

A job that hardly uses the tensor cores, or FP64 more, is measured by what it computes with. Where no counter shows what
its kernels compute (integer work, graphics, video), their time is unresolved, and eMFU does not apply.
"""

from collections.abc import Mapping

from msgspec import Struct

from exporter.core.evidence import NO_SPIN, Evidence
from exporter.core.model import PPM

TENSOR, FP64, FP32, NONE = PIPES = ("tensor", "fp64", "fp32", "none")
PIPE_NOTES: Mapping[str, str] = {
    FP64: "useful is the activity of the FP64 pipe: the job uses no tensor cores",
    FP32: "useful is the activity of the FP32 pipe: the job uses no tensor cores, which are faster where TF32 or 16 "
    "bits suffice",
    NONE: "eMFU does not apply: no counter shows what its kernels compute (integer work, graphics, video); their time "
    "is unresolved",
}
"""What to know about the figures of a job whose useful work is not that of the tensor cores."""
_SEEN = 60_000 * PPM
"""E: a minute of kernels, in milliseconds x ppm, shows which pipe they use."""
_TENSOR_SHARE = 0.005
"""E: with less tensor activity than this share of its kernels' time, a job does not compute with the tensor cores."""
_PIPE_SHARE = 0.05
"""E: with more than this share, it computes with that pipe."""
_MEMORY_SHARE = 0.4
"""E: with more DRAM activity than this share, its kernels are limited by memory, whatever little they compute."""


class PipeUse(Struct, eq=False, array_like=True):
    """Totals of one job's kernels, milliseconds x ppm, of readings in which all pipes were measured."""

    kernels: int = 0
    tensor: int = 0
    fp64: int = 0
    fp32: int = 0
    fp16: int = 0
    dram: int = 0

    def add(self, ev: Evidence, ms: int) -> None:
        """Add `ms` milliseconds of a reading; time of the video engines is like that of kernels."""
        reading = ev.reading
        fp64, fp32, fp16 = reading.fp64_active, reading.fp32_active, reading.fp16_active
        if ev.tensor is None or ev.dram is None or fp64 is None or fp32 is None or fp16 is None:
            return
        if not ev.work or ev.spin != NO_SPIN:  # a kernel that polls computes with no pipe
            return
        self.kernels += (PPM - ev.wait + ev.video) * ms
        self.tensor += round(ev.tensor * PPM) * ms
        self.fp64 += round(fp64 * PPM) * ms
        self.fp32 += round(fp32 * PPM) * ms
        self.fp16 += round(fp16 * PPM) * ms
        self.dram += round(ev.dram * PPM) * ms

    def pipe(self) -> str:
        """The pipe that the job computes with; the tensor cores until another one is seen."""
        least = _PIPE_SHARE * self.kernels
        if self.kernels < _SEEN:
            return TENSOR
        if self.fp64 >= max(least, self.tensor, self.fp32):  # no model is trained or served in FP64
            return FP64
        if self.tensor >= _TENSOR_SHARE * self.kernels:
            return TENSOR
        if self.fp32 >= least:
            return FP32
        return TENSOR if self.fp16 >= least or self.dram >= _MEMORY_SHARE * self.kernels else NONE


def pipe_activity(ev: Evidence, pipe: str) -> float:
    """Share of time in which a pipe was active, 0-1; 0 if it is unknown."""
    activity = ev.tensor if pipe == TENSOR else getattr(ev.reading, f"{pipe}_active", None)
    return activity or 0.0


def pools_of(ev: Evidence, pipe: str) -> list[int]:
    """Divide a reading into the pools of `leaks`, parts per million, by the pipe whose activity is useful."""
    wait, kernels = ev.wait - ev.video, PPM - ev.wait
    if pipe == TENSOR or ev.unresolved or ev.spin != NO_SPIN:
        return [wait, ev.slack + ev.video, ev.clock_loss, ev.ofu, ev.unresolved]
    if pipe == NONE:
        return [wait, 0, 0, 0, kernels + ev.video]
    active = min(kernels, round(pipe_activity(ev, pipe) * PPM))
    useful = min(kernels, int(active * ev.clock))
    return [wait, kernels - max(active, useful) + ev.video, max(0, active - useful), useful, 0]
