"""A figure is judged by the band of what runs: who serves is not red for what decoding costs, who trains is."""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from dashboards import bands
from dashboards.build import FOLDER, boards
from dashboards.parts import Panel, Query
from tests.dashboards.grafana import asker, opened
from tests.dashboards.stories import Story
from tests.dashboards.world import world

BOARDS = {board.name: board for board in boards()}
SERVING, TRAINING = "memory_bound_decode", "healthy_training"
FACTORS = ("gau", "ectr", "emfu")
Letters = Callable[[str, str, str], list[str]]


def panel(board: str, title: str) -> Panel:
    """Of a board, by its title."""
    return next(found for found in BOARDS[board].panels() if found.title == title)


@pytest.fixture(name="answered", scope="module")
def _answered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Letters]:
    """Which queries of a panel have a figure, by letter: board, cluster, title."""
    told = (
        Story(cluster=SERVING, scenario=SERVING, gpus=4),
        Story(cluster=TRAINING, scenario=TRAINING, gpus=2),
    )
    with (
        world(tmp_path_factory.mktemp("bands"), told=told) as made,
        httpx.Client(base_url=made.past.url, trust_env=False, timeout=60) as client,
    ):

        def letters(board: str, cluster: str, title: str) -> list[str]:
            read = json.loads((FOLDER / f"gpu-efficiency-{board}.json").read_text())
            panels = opened(read, asker(client), made.last(60), chosen={"cluster": [cluster]})
            answers = next(found for found in panels if found.title == title).answers
            assert not [answer.error for answer in answers if answer.error]
            return [answer.ref for answer in answers if answer.series]

        yield letters


def test_each_answer_has_a_band_for_each_class() -> None:
    both: dict[str, tuple[Query, ...]] = {
        "product": panel("job", "Useful").queries,
        **{which: panel("job", title).queries for which, title in zip(FACTORS, ("GAU", "ECTR", "eMFU"), strict=True)},
    }
    for which, (trains, serves) in both.items():
        assert trains.steps == bands.judged(bands.TRAINING[which])
        assert serves.steps == bands.judged(bands.SERVING.get(which))
    assert len(bands.judged(None)) == 1, "what has no band has one colour"


@pytest.mark.e2e
@pytest.mark.parametrize(("cluster", "letters"), [(TRAINING, ["A"]), (SERVING, ["B"])])
@pytest.mark.parametrize(
    ("board", "title"),
    [("fleet", "What we get"), ("node", "Useful"), ("chargeback", "Useful")],
)
def test_by_what_has_most_of_the_gpu_time(
    answered: Letters, board: str, title: str, cluster: str, letters: list[str]
) -> None:
    judged = [query.steps for query in panel(board, title).queries]
    times = 100 if board == "fleet" else 1
    assert judged == [bands.judged(of["product"], times=times) for of in (bands.TRAINING, bands.SERVING)]
    assert answered(board, cluster, title) == letters


@pytest.mark.e2e
@pytest.mark.parametrize(("cluster", "letters"), [(TRAINING, "ACEGI"), (SERVING, "BDFHI")])
def test_the_three_factors_of_servers_are_not_judged(answered: Letters, cluster: str, letters: str) -> None:
    assert answered("fleet", cluster, "GAU x ECTR x eMFU = useful") == list(letters)
