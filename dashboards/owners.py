"""Whose a job is: its team, or its account where no workload rule gives it a team; and the way to that bill."""

from dashboards.parts import Column
from dashboards.series import field, to

BILLED = field("bill")
BILL = Column(of="bill", title="Bill of the link", hidden=True)
"""What the link of an owner's name opens: the owner, or All."""
_BILL = to("chargeback", "Its bill", team=field("team"), account=BILLED)


def to_bill(label: str, expr: str, nobody: str) -> str:
    """A series by that label of owners, with BILL: All where the label is no owner's, but `nobody` fits it (RE2)."""
    own = f'label_replace({expr}, "bill", "$1", "{label}", "(.*)")'
    return f'label_replace({own}, "bill", "All", "{label}", "{nobody}")'


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
        BILL,
    )
