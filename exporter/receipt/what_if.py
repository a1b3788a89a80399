"""What a change would gain. Owns the arithmetic (docs/report.md); refuses to add two changes, or two ways of one gain.

Each is of the job as it was seen: time that nobody observed is taken to stay.
"""

from collections.abc import Iterator

from exporter.receipt.model import Part, Receipt, WhatIf

_SIZE = "oversized_allocation"
"""A loss of a part of a GPU: without it the job is no sooner done."""


def what_if(receipt: Receipt, *, emfu: float | None = None) -> tuple[WhatIf, ...]:
    """Right-size it, fix its biggest leak, raise its eMFU; what would gain nothing is left out."""
    if not receipt.gpu_hours or not receipt.when.seconds:
        return ()
    found = [*_right_sizes(receipt), *_fixed(receipt), *_raised(receipt, emfu)]
    return tuple(each for each in found if each.gpu_hours > 0)


def _right_sizes(receipt: Receipt) -> Iterator[WhatIf]:
    """A slice instead of its GPU; or without the nodes on which it never ran a kernel."""
    if receipt.fitting:
        yield _gain(receipt, kind="right_size", of=receipt.fitting, hours=receipt.unneeded_gpu_hours, sooner=False)
    idle = [node for node in receipt.nodes if node.gau == 0]
    if idle:
        names = ", ".join(node.name for node in idle)
        hours = sum(node.gpu_hours - node.unseen_gpu_hours for node in idle)
        yield _gain(receipt, kind="right_size", of=f"without {names}", hours=hours, sooner=False)


def _fixed(receipt: Receipt) -> Iterator[WhatIf]:
    """Its time falls away; in the same time there would be as much more work as the time grows."""
    for part in receipt.losses[:1]:
        left = sum(each.gpu_hours for each in receipt.parts if each.layer != "unobserved") - part.gpu_hours
        useful = _hours(receipt, "useful")
        more = useful * part.gpu_hours / left if left > 0 and part.name != _SIZE else None
        yield _gain(
            receipt, kind="fix_leak", of=part.name, hours=part.gpu_hours, sooner=part.name != _SIZE, more=more,
            money=part.money,
        )  # fmt: skip


def _raised(receipt: Receipt, wanted: float | None) -> Iterator[WhatIf]:
    """The same work needs so much less kernel time; or the same kernel time gives so much more work."""
    now = receipt.layers.emfu
    if wanted is None or now is None:
        return
    kernels = sum(_hours(receipt, layer) for layer in ("emfu", "useful", "unresolved"))
    yield _gain(
        receipt, kind="raise_emfu", of=f"{100 * wanted:g} %", hours=kernels * (1 - now / wanted), sooner=True,
        more=kernels * (wanted - now),
    )  # fmt: skip


def _gain(
    receipt: Receipt,
    *,
    kind: str,
    of: str,
    hours: float,
    sooner: bool,
    more: float | None = None,
    money: float | None = None,
) -> WhatIf:
    """`hours`: GPU-hours that the same work would not need; `more`: those at their peak that more work would be."""
    run = receipt.when.seconds / 3600
    return WhatIf(
        kind=kind,
        of=of,
        gpu_hours=hours,
        share=hours / receipt.gpu_hours,
        money=_price(receipt, hours) if money is None else money,
        fewer_gpus=hours / run,
        sooner=hours / receipt.gpu_hours * receipt.when.seconds if sooner else None,
        gained_gpus=None if more is None else more / run,
        gained_money=None if more is None else _price(receipt, more),
    )


def _price(receipt: Receipt, hours: float) -> float | None:
    """At what its GPU-hours cost on average."""
    return None if receipt.money is None else hours / receipt.gpu_hours * receipt.money


def _hours(receipt: Receipt, layer: str) -> float:
    parts: Iterator[Part] = (part for part in receipt.parts if part.layer == layer)
    return sum(part.gpu_hours for part in parts)
