"""Tests the text of a preview: at most 80 columns for any name, and no silent omission."""

import pytest

from exporter.preview.scoring import (
    WIDTH,
    Hit,
    PreviewResult,
    Score,
    elapsed_text,
    name_some,
    preview_text,
    unjudged_notes,
)


def hit(number: int, **changes: object) -> Hit:
    given = {
        "job_id": f"{number}", "name": "", "user": "", "cluster": "", "taken_at": 0.0, "after_seconds": 90.0,
        "gpus": {"GPU-0"},
    }  # fmt: skip
    return Hit(**(given | changes))  # type: ignore[arg-type]


def score(label: str = "as configured", **changes: object) -> Score:
    given = {
        "label": label, "settings": {}, "episodes": 3, "episodes_right": 2, "episodes_wrong": 1, "episodes_unjudged": 0,
        "precision": 2 / 3, "gpu_hours_freed": 1234.56, "money_freed": {}, "gpu_hours_wrongly_freed": 0.26,
        "money_wrongly_freed": {}, "gpu_hours_unjudged": 0.0, "gpu_hours_work_lost": 0.14, "jobs_reclaimed": 2,
        "jobs_hit": 0, "hits": (),
    }  # fmt: skip
    return Score(**(given | changes))  # type: ignore[arg-type]


def shown(*rows: Score, **changes: object) -> str:
    given = {
        "source": "Replayed: a.jsonl", "since": 0.0, "until": 7200.0, "gpu_hours_held": 16.0,
        "taken_back_when": ("zombie",), "rows": rows,
    }  # fmt: skip
    found = preview_text(PreviewResult(**(given | changes)))  # type: ignore[arg-type]
    assert [line for line in found.splitlines() if len(line) > WIDTH] == []
    return found


def test_the_head_says_what_was_looked_at() -> None:
    assert shown(score(), taken_back_when=("hung", "zombie")).startswith(
        "Replayed: a.jsonl\n1970-01-01 00:00 UTC to 1970-01-01 02:00 UTC, 16.0 GPU-hours held\n"
        "Assumed: a GPU is reclaimed when it hangs or it is a zombie.\n"
        "Right: until its allocation or the recording ended, the GPU did no real work.\n"
        "Real work: effective work for more than 1 % of that time or more than 10 min in\nall, by the readings:"
    )


def test_a_row_has_its_figures_in_order() -> None:
    line = shown(score(jobs_hit=1)).splitlines()[-1]
    assert line.split() == ["as", "configured", "3", "1,234.6", "0.3", "0.1", "1/2"]


def test_classes_and_the_plain_rule_have_rows_of_their_own() -> None:
    lines = shown(score(by_class=(score("batch"), score("x" * 40))), plain_rule=score("engine at 0")).splitlines()
    labels = [line[:24].rstrip() for line in lines[-5:]]
    assert labels == ["as configured", "  batch", "  " + "x" * 22, "  " + "x" * 18, "engine at 0"]


def test_what_could_not_be_judged_is_noted() -> None:
    (note,) = unjudged_notes([score("a", episodes_unjudged=2), score("b"), score("c", episodes_unjudged=1)])
    assert note.endswith("observed: a 2, c 1")
    assert list(unjudged_notes([score()])) == []


def test_each_currency_has_a_line_and_without_prices_there_is_no_column() -> None:
    first, second, third = shown(score(money_freed={"USD": 1234.5, "EUR": 3.0}), score("b")).splitlines()[-3:]
    assert first.split()[-3:] == ["3.00", "EUR", "0/2"]
    assert second.split() == ["1,234.50", "USD"]
    assert second.rindex("USD") == first.index("EUR")
    assert third.split()[-2:] == ["0", "0/2"]
    assert "money" not in shown(score())


def test_long_names_are_cut_in_the_middle_and_control_signs_are_not_passed_on() -> None:
    name = "ml/job/" + "x" * 200 + "\x1b[2J-7"
    found = shown(
        score("zombie.batch=15m " * 4, hits=(hit(1, name=name, user="u" * 90, job_id=name),)), notes=("n" * 300,)
    )
    assert "\x1b" not in found
    assert "ml/job/xxxxxx..xxxxxxx?[2J-7" in found


def test_ten_jobs_are_named_and_the_others_counted() -> None:
    found = shown(score(hits=tuple(hit(n, user="ada") for n in range(12))))
    assert found.count("worked 2 min later") == 10
    assert "  and 2 more; --json lists them all" in found


def test_a_hit_says_who_when_and_how_often() -> None:
    often = hit(
        7, name="train", user="ada", cluster="eu", gpus={"a", "b"}, times=3, after_seconds=3900, work_gpu_hours=2.5
    )
    found = shown(score(hits=(often,)))
    assert found.splitlines()[-2].split() == [
        "train",
        "ada",
        "worked",
        "1",
        "h",
        "05",
        "min",
        "later",
        "for",
        "2.5",
        "h",
    ]
    assert found.splitlines()[-1] == "    job 7 in eu, reclaimed 1970-01-01 00:00 UTC, 2 GPUs, 3 times"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(45, "45 s"), (90, "2 min"), (3600, "1 h 00 min"), (3 * 3600 + 290, "3 h 05 min"), (52 * 3600, "2 d 4 h")],
)
def test_times_are_said_in_two_units(seconds: float, words: str) -> None:
    assert elapsed_text(seconds) == words


def test_notes_name_some_and_count_the_rest() -> None:
    assert name_some(["b", "a"]) == "a, b"
    assert name_some(f"{n}" for n in range(5)) == "0, 1, 2 and 2 more"
