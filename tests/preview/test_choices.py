"""Tests the parsing of `--policy`: names, times, and one row for each combination."""

import pytest

from exporter.config import ConfigError
from exporter.core.policy import Policy
from exporter.preview.scoring import SHORT_NAMES, policy_rows, trigger_states

ASKED = Policy(zombie_batch_seconds=1234.0)


def test_every_short_name_moves_the_threshold_it_stands_for() -> None:
    wanted = {"zombie.duty": "0.5"}
    for name, field in SHORT_NAMES.items():
        _, row = policy_rows(ASKED, [f"{name}={wanted.get(name, '77s')}"])
        assert row.settings == {field: 0.5 if name in wanted else 77.0}
        assert getattr(row.policy, field) == row.settings[field]


def test_the_configured_policy_is_the_first_row_and_the_base_of_the_others() -> None:
    first, second = policy_rows(ASKED, ["wake_seconds=20s"])
    assert (first.policy, first.settings) == (ASKED, {})
    assert (second.policy.wake_seconds, second.policy.zombie_batch_seconds) == (20.0, 1234.0)


def test_each_value_is_a_row_and_several_names_are_combined() -> None:
    found = policy_rows(ASKED, ["zombie.batch=15m,1h", "hang=60", "zombie.batch=2h"])
    assert [row.label for row in found[1:]] == [
        "zombie.batch=15m hang=60", "zombie.batch=1h hang=60", "zombie.batch=2h hang=60",
    ]  # fmt: skip
    assert [row.policy.zombie_batch_seconds for row in found[1:]] == [900, 3600, 7200]
    assert {row.policy.hang_seconds for row in found[1:]} == {60}


@pytest.mark.parametrize(
    ("wanted", "states"),
    [
        ("zombie.serving=1h", {"zombie"}),
        ("working_dram=0.02", {"zombie"}),
        ("hang=1m", {"hung"}),
        ("spin_engine=0.9", {"hung"}),
        ("no_process=10m", {"no_process"}),
    ],
)
def test_a_threshold_takes_back_in_the_state_it_leads_to(wanted: str, states: set[str]) -> None:
    assert trigger_states(policy_rows(ASKED, [wanted])) == states
    assert trigger_states(policy_rows(ASKED, [wanted, "hang=30s", "zombie.batch=1h"])) == states | {"hung", "zombie"}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("zombie.batch", "--policy zombie.batch: is not NAME=VALUE"),
        ("zombie.batch=", "--policy zombie.batch=: is not NAME=VALUE"),
        ("zombie.batch=soon", "--policy zombie.batch=soon: 'soon' is not a duration"),
        ("zombie.batch=1w", "'1w' is not a duration such as 90s, 10m, 1h30m or 2d, or a number of seconds"),
        ("zombie.batch=1h,,2h", "'' is not a duration"),
        ("zombie.batch=0", "--policy zombie.batch=0: Expected `float` > 0.0 - at `$.zombie_batch_seconds`"),
        ("zombie.duty=2", "Expected `float` <= 1.0 - at `$.zombie_duty`"),
        ("zombie.duty=1s", "--policy zombie.duty=1s: '1s' is not a number"),
        ("zombie.training=1h", "there is no threshold 'zombie.training'; known are zombie.batch, zombie.interactive"),
        ("fatal_xids=79", "there is no threshold 'fatal_xids'"),
        ("hang=1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24", "24 combinations of values; 23"),
    ],
)
def test_what_cannot_be_tried_is_one_line_that_names_it(wanted: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        policy_rows(ASKED, [wanted])
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
