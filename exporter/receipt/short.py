"""A receipt in one line and in a few, for epilogs and job comments. Owns what is left out."""

from collections.abc import Iterator

from exporter.receipt.model import Receipt
from exporter.receipt.text import WIDTH, safe
from exporter.wording import amount, elapsed, percent
from exporter.wording import short as cut


def line(receipt: Receipt) -> str:
    """One line, without its end."""
    worst = "".join(f"; most lost to {part.name}, {percent(part.share)}" for part in receipt.losses[:1])
    money = "" if receipt.money is None else f"; {receipt.money:,.2f} {receipt.currency}"
    blind = "" if _all_seen(receipt) else f"; {percent(receipt.coverage)} of it observed"
    absent = f"; {len(receipt.nodes)} of {receipt.expected_nodes} nodes" if _absent(receipt) else ""
    return safe(
        f"job {receipt.who.job_id}: {percent(receipt.layers.product)} useful ({_layers(receipt)}) of"
        f" {receipt.gpu_hours:,.2f} GPU-hours on {_gpus(receipt)} in {elapsed(receipt.when.seconds)}"
        f"{worst}{money}{blind}{absent}"
    )


def short(receipt: Receipt) -> str:
    """Eight lines at most, 80 columns."""
    return "".join(f"{cut(each, WIDTH)}\n" for each in _lines(receipt))


def _lines(receipt: Receipt) -> Iterator[str]:
    who, state = receipt.who, "so far" if receipt.when.running else "ended"
    user = f" of {who.user}" if who.user else ""
    yield f"GPU efficiency of job {who.job_id}{user}: {elapsed(receipt.when.seconds)} {state}{_simulated(receipt)}"
    money = "" if receipt.money is None else f", {receipt.money:,.2f} {receipt.currency}"
    energy = "" if receipt.energy_kwh is None else f", {amount(receipt.energy_kwh)} kWh"
    yield f"  {receipt.gpu_hours:,.2f} GPU-hours on {_gpus(receipt)}{money}{energy}"
    yield f"  {percent(receipt.layers.product)} useful = {_layers(receipt)}"
    for part in receipt.losses[:1]:
        cost = "" if part.money is None else f", {part.money:,.2f} {receipt.currency}"
        yield f"  lost most to {part.name}: {percent(part.share)}, {part.gpu_hours:,.2f} GPU-hours{cost}"
        if part.fix:
            yield f"    do: {part.fix}"
    failed = [f"{each.kind} {amount(each.times)}" for each in receipt.failures if each.times]
    if failed:
        yield f"  failed: {', '.join(failed)}"
    if not _all_seen(receipt) or _absent(receipt):
        nodes = f", {len(receipt.nodes)} of {receipt.expected_nodes} nodes told of it" if _absent(receipt) else ""
        yield f"  {percent(receipt.coverage)} of the time was observed{nodes}"
    yield f"  all of it: gpu-efficiency report {who.job_id}"


def _simulated(receipt: Receipt) -> str:
    return " (SIMULATED)" if receipt.simulated else ""


def _layers(receipt: Receipt) -> str:
    layers = receipt.layers
    return f"GAU {percent(layers.gau)} x ECTR {percent(layers.ectr)} x eMFU {percent(layers.emfu)}"


def _gpus(receipt: Receipt) -> str:
    return f"{amount(receipt.gpus)} GPU" + ("" if receipt.gpus == 1 else "s")


def _all_seen(receipt: Receipt) -> bool:
    return percent(receipt.coverage) == "100.0 %"


def _absent(receipt: Receipt) -> bool:
    return len(receipt.nodes) < receipt.expected_nodes
