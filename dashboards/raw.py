"""GPU-seconds and money from the counters of nodes, without any recording rule.

Owns how a node's own counters are asked for: what they have grown by over the time shown, or their rate. It reads every
node within its scope, so it is for one node, or for a small fleet. Refuses what is recorded (`series`).
"""

from dashboards.series import at

SECONDS, KERNELS = "gpu_efficiency_node_seconds_total", "gpu_efficiency_node_kernel_seconds_total"
GROWN, NOW = "increase $__range", "rate 5m"
"""Over the time shown; now, over five minutes, so that any scrape interval up to two minutes has a rate."""
OBSERVED, OCCUPIED = 'layer!="unobserved"', 'layer!~"unobserved|gau"'
COMPUTING, RESOLVED, USEFUL = 'layer!~"unobserved|gau|ectr"', 'layer=~"emfu|useful"', 'layer="useful"'
LOST = 'layer=~"gau|ectr|emfu"'
_RATIOS = {
    "gau": (OCCUPIED, OBSERVED),
    "ectr": (COMPUTING, OCCUPIED),
    "emfu": (USEFUL, RESOLVED),
    "coverage": (OBSERVED, ""),
    "floor": (USEFUL, OBSERVED),
}


def seconds(*where: str, by: str = "", time: str = GROWN, name: str = SECONDS) -> str:
    """GPU-seconds of whole nodes: what their counters have grown by, or a `rate` of them."""
    function, length = time.split()
    return f"sum by ({by}) ({function}({at(name, *where)}[{length}]))"


def ratio(which: str, *scope: str, by: str = "", time: str = GROWN) -> str:
    """One of GAU, ECTR, eMFU, the coverage, or useful of what was seen (`floor`); nothing where nothing was."""
    above, below = (tuple(filter(None, [where])) for where in _RATIOS[which])
    return f"{seconds(*scope, *above, by=by, time=time)} / ({seconds(*scope, *below, by=by, time=time)} > 0)"


def product(*scope: str, time: str = GROWN) -> str:
    """GAU x ECTR x eMFU; 0 where nothing computed."""
    three = " * ".join(ratio(which, *scope, time=time) for which in ("gau", "ectr", "emfu"))
    return f"{three} or {ratio('floor', *scope, time=time)}"


def kernels(*scope: str, time: str = GROWN) -> str:
    """The kernel utilisation that nvidia-smi shows, of paid time."""
    return f"{seconds(*scope, time=time, name=KERNELS)} / ({seconds(*scope, time=time)} > 0)"


def money(scope: str, *where: str, by: str = "currency", time: str = GROWN) -> str:
    """Hours times price; of a price that has changed its currency the dearer, and of the time shown the last."""
    of_price = "cluster, instance, model, held"
    within = tuple(filter(None, [scope]))
    price = (
        f"topk by ({of_price}) (1, max by ({of_price}, currency)"
        f" (last_over_time({at('gpu_efficiency_price_per_gpu_hour', *within)}[{time.split()[1]}])))"
    )
    return (
        f"sum by ({by}) ({seconds(*within, *where, by=f'{of_price}, leak', time=time)}"
        f" * on ({of_price}) group_left (currency) {price})"
    )
