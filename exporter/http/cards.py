"""The page's cards: one GPU each, what it does, for whom, and where its hour went.

Owns the words. A zero, a thing not seen and a thing the hardware cannot say look different, and none of the last two
looks well.
"""

from collections.abc import Iterable

from exporter.http.api import GpuOut, OwnerOut
from exporter.http.appearance import MARKS
from exporter.http.drawing import bar, worst
from exporter.http.words import TIMES, complaints, duration, iso, job_path, plain, ratio, text


def cards(gpus: Iterable[GpuOut], *, was: str) -> str:
    """All GPUs; `was` stands before what no longer holds."""
    shown = "".join(_card(gpu, was=was) for gpu in gpus)
    return f'<section id="gpus"><h2>GPUs</h2><div class="gpus">{shown}</div></section>' if shown else ""


def _card(gpu: GpuOut, *, was: str) -> str:
    return (
        f'<article class="gpu {gpu.state}" data-key="{text(gpu.uuid)}">'
        f'<div class="top"><h3>GPU {text(gpu.index) or "?"} '
        f'<small title="{text(gpu.uuid)}">{_what(gpu)}</small></h3>{_state(gpu, was=was)}</div>'
        f"{bar(gpu.last_hour, height=16)}{_equation(gpu)}{worst(gpu.last_hour)}{_facts(gpu)}</article>"
    )


def _what(gpu: GpuOut) -> str:
    model = text(gpu.model) or "unknown model"
    if gpu.parent:
        return f"MIG {text(gpu.profile)} of {model}"
    return model if gpu.share == 1 else f"{model}, {100 * gpu.share:.0f} % not partitioned"


def _state(gpu: GpuOut, *, was: str) -> str:
    suspect = ' <span class="suspect">hang suspected</span>' if gpu.hang_suspected and gpu.state != "hung" else ""
    since = f'<time datetime="{iso(gpu.since)}">{duration(gpu.state_seconds)}</time>'
    return (
        f'<p class="state"><b><span aria-hidden="true">{MARKS[gpu.state]}</span> {was}{gpu.state}</b>'
        f" for {since}: {plain(gpu.reason)}{suspect}</p>"
    )


def _equation(gpu: GpuOut) -> str:
    hour = gpu.last_hour
    return (
        f'<p class="equation"><span>{ratio(hour, "gau")} allocated {TIMES} {ratio(hour, "ectr")} computing {TIMES} '
        f"{ratio(hour, 'emfu')} useful = <b>{ratio(hour, 'product')}</b></span>"
        f'<span class="mute tight">nvidia-smi {ratio(hour, "driver_utilization")}</span></p>'
    )


def _facts(gpu: GpuOut) -> str:
    used, whole = gpu.memory_used_bytes, gpu.memory_total_bytes
    of = f" of {whole / 2**30:.0f}" if whole is not None else ""
    limit = f" of {gpu.power_limit_watts:.0f}" if gpu.power_limit_watts is not None else ""
    watts, celsius = gpu.power_watts, gpu.temperature_celsius
    facts = [
        ("held by", _owners(gpu.owners)),
        ("power", _value(gpu, "power_watts", None if watts is None else f"{watts:.0f}{limit} W")),
        ("temperature", _value(gpu, "temperature_celsius", None if celsius is None else f"{celsius:.0f} °C")),
        ("memory", _value(gpu, "memory_used_bytes", None if used is None else f"{used / 2**30:.1f}{of} GiB")),
        ("data", _age(gpu)),
        *(("health", told) for told in filter(None, [complaints(gpu.health)])),
    ]
    return f'<dl class="facts">{"".join(f"<div><dt>{term}</dt><dd>{told}</dd></div>" for term, told in facts)}</dl>'


def _value(gpu: GpuOut, signal: str, shown: str | None) -> str:
    if shown is not None:
        return f'<span class="now">{shown}</span>'
    if not gpu.live:
        return '<span class="none">no data</span>'
    return f'<span class="unsupported">{"unsupported" if signal in gpu.unsupported else "not reported"}</span>'


def _age(gpu: GpuOut) -> str:
    if gpu.age_seconds is None:
        return '<span class="none">none yet</span>'
    return '<span class="now">live</span>' if gpu.live else f'<span class="none">{duration(gpu.age_seconds)} old</span>'


def _owners(owners: Iterable[OwnerOut]) -> str:
    return ", ".join(_owner(owner) for owner in owners) or '<span class="mute">nobody</span>'


def _owner(owner: OwnerOut) -> str:
    who = owner.user or owner.namespace
    link = f'<a href="{job_path(owner.job_id)}"><bdi>{text(owner.job_id)}</bdi></a>'
    return link + (f' <bdi class="mute">{text(who)}</bdi>' if who else "")
