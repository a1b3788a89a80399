"""Names of Slurm jobs in arrays and heterogeneous jobs, as squeue and sacct show them."""

from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import Owner, display_job_id, parse_display_id
from tests.each import each

NAMES = (
    # job_id, array_id, array_task_id, het_job_offset, what squeue and sacct show
    ("4711", "", "", "", "4711"),
    ("8", "6", "1", "", "6_1"),
    ("6", "6", "0", "", "6_0"),
    ("7", "7", "", "0", "7+0"),
    ("8", "7", "", "1", "7+1"),
    ("8", "6", "", "", "8"),
    ("ns/pod-0", "", "", "", "ns/pod-0"),
)


@each("job_id, array, task, offset, shown", NAMES)
def test_the_name_of_a_job_is_the_one_that_squeue_shows(
    job_id: str, array: str, task: str, offset: str, shown: str
) -> None:
    assert display_job_id(job_id, array, task, offset) == shown
    assert Owner(job_id, array_id=array, array_task_id=task, het_job_offset=offset).display_id == shown
    assert parse_display_id(shown) == (None if shown == job_id else (array, task, offset))


@given(st.from_regex(r"[0-9]{1,10}", fullmatch=True), st.from_regex(r"[0-9]{1,10}", fullmatch=True), st.booleans())
def test_a_name_is_read_as_it_was_written(array: str, place: str, het: bool) -> None:
    parts = (array, "", place) if het else (array, place, "")
    assert parse_display_id(display_job_id("1", *parts)) == parts


@given(st.text(alphabet="0123456789_+.٣-[]", max_size=14))
def test_what_is_no_such_name_is_none(text: str) -> None:
    found = parse_display_id(text)
    assert found is None or display_job_id("", *found) == text
