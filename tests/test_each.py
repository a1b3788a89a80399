"""One test over many rows reports each row that fails."""

import inspect

import pytest

from tests.each import each


def test_every_case_is_tried_and_every_fault_is_reported_with_its_case() -> None:
    tried = []

    @each("left, right", [(1, 1), (1, 2), (3, 3), (4, 5)])
    def check(left: int, right: int, fixture: str) -> None:
        tried.append((left, fixture))
        assert left == right

    with pytest.raises(ExceptionGroup, match="2 of 4 cases fail") as caught:
        check(fixture="given")
    assert tried == [(1, "given"), (1, "given"), (3, "given"), (4, "given")]
    assert [error.__notes__ for error in caught.value.exceptions] == [["in the case 1, 2"], ["in the case 4, 5"]]
    assert list(inspect.signature(check).parameters) == ["fixture"]


def test_a_table_without_rows_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no case gives a value to row"):
        each("row", [])
