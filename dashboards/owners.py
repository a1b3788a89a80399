"""Whose a job is: its team, or its account where no workload rule gives it a team; and the way to that bill."""

from dashboards.parts import Column
from dashboards.series import to

_BILL = to("chargeback", "Its bill", team="${__data.fields.team}", account="${__data.fields.bill}")


def whose(expr: str) -> str:
    """A series with team and account, under `whose` what stands for its owner, and under `bill` the account to open."""
    joined = f'label_join({expr}, "whose", ";", "team", "account")'
    named = f'label_replace({joined}, "whose", "$1$2", "whose", "([^;]+);.*|;(.*)")'
    of_account = f'label_replace({named}, "bill", "$1", "account", "(.*)")'
    return f'label_replace({of_account}, "bill", "All", "team", ".+")'


def whose_columns(title: str = "Team", width: int = 115) -> tuple[Column, ...]:
    """Its cell, and what the link of that reads."""
    return (
        Column(of="whose", title=title, link=_BILL, width=width),
        Column(of="team", title="Team of the link", hidden=True),
        Column(of="bill", title="Account of the link", hidden=True),
    )
