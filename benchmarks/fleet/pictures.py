"""Pictures of what a fleet costs its Prometheus, and of what recording rules buy.

Owns the drawing, from the curves of the group `rules` alone.
"""

from typing import TYPE_CHECKING, Any

from benchmarks.group import Curves, Picture

if TYPE_CHECKING:  # drawing alone needs it, and it is not small
    from matplotlib.figure import Figure

_TIMES = 10
_BESIDE = (((-8, 8), "right"), ((8, -14), "left"))
"""Where a line's name stands, so that two lines close to each other can be told apart."""


def _by_size(figure: "Figure", curves: Curves) -> None:
    left, right = figure.subplots(1, 2)
    _grown(left, curves["gpus"], {"all rules": curves["rules"], "scraping and storing": curves["scraping"]})
    left.set(title="Processor", ylabel="% of one core")
    _grown(right, curves["gpus"], {"resident": curves["memory"]})
    right.set(title="Memory", ylabel="GiB")
    figure.suptitle("A Prometheus grows as its fleet does (dashed: extrapolated)", x=0.01, ha="left", weight="bold")


def _grown(axes: Any, gpus: list[int], lines: dict[str, list[float]]) -> None:
    from benchmarks.drawing import COLOURS  # noqa: PLC0415  it needs matplotlib, which only who draws has to have

    last = gpus[-1]
    for colour, marker, (name, values), (offset, side) in zip(COLOURS, "os", lines.items(), _BESIDE, strict=False):
        axes.plot(gpus, values, color=colour, marker=marker)
        axes.plot([last, _TIMES * last], [values[-1], _TIMES * values[-1]], color=colour, linestyle="--")
        axes.annotate(
            f"{name}: {values[-1]:.1f}",
            (last, values[-1]),
            textcoords="offset points",
            xytext=offset,
            ha=side,
            color=colour,
        )
    axes.set(xscale="log", yscale="log", xlabel="GPUs")
    axes.set_xticks([*gpus, _TIMES * last], [f"{each:,}" for each in (*gpus, _TIMES * last)])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _bought(figure: "Figure", curves: Curves) -> None:
    from benchmarks.drawing import COLOURS  # noqa: PLC0415  as above

    axes = figure.subplots()
    names = curves["questions"][::-1]
    for place, (recorded, raw) in enumerate(zip(curves["recorded"][::-1], curves["raw"][::-1], strict=True)):
        axes.plot([recorded, raw], [place, place], color=COLOURS[5], linewidth=1)
        axes.plot(recorded, place, "o", color=COLOURS[0])
        axes.plot(raw, place, "s", color=COLOURS[1])
        axes.annotate(f"{recorded:,.1f}", (recorded, place), textcoords="offset points", xytext=(0, 7), ha="center")
        axes.annotate(f"{raw:,.0f}", (raw, place), textcoords="offset points", xytext=(0, 7), ha="center")
    axes.set(xscale="log", xlabel="milliseconds in Prometheus: recorded (round), raw (square)")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.5, len(names) - 0.3)
    axes.set_title("The same questions, of recorded and of raw series")


BY_SIZE = Picture(
    name="fleet-by-size",
    words=(
        "Processor and memory that Prometheus takes for 1,000 and 10,000 GPUs, with a dashed line to ten times as "
        "many: rules, scraping and memory all grow as the fleet does."
    ),
    draw=_by_size,
)
BOUGHT = Picture(
    name="fleet-recorded",
    words="Five questions of the boards: milliseconds each takes of recorded series, and of raw ones, on a log scale.",
    draw=_bought,
)
