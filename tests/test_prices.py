"""Prices, budgets, exemptions and a model's own thresholds, as an operator writes them."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from exporter.agent.agent import Agent
from exporter.config import ConfigError, Exemption, load
from exporter.core.model import SECOND, Owner
from exporter.core.prices import CarbonIntensity, EnergyTerms, Price, Terms
from exporter.core.snapshot import DaemonMetadata
from exporter.schedulers.rules import Rules
from tests.worlds import device, first

NEW_YEAR = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
FULL = """
[host]
pool = "reserved"
[[prices]]
per_gpu_hour = 2.5
[[prices]]
model = "NVIDIA L4"
pool = "spot"
per_gpu_hour = 0.4
currency = "EUR"
basis = "allocated"
valid_from = 2027-01-01
[energy]
price_per_kwh = 0.12
currency = "EUR"
grams_co2_per_kwh = 380
[budget]
idle_per_hour = 100
[[exemptions]]
id = "eval"
reason = "nightly evaluation rests between runs"
expires = 2027-01-01
namespace = "eval-.*"
[policy]
hang_seconds = 200
[policy_by_model."NVIDIA L4"]
spin_power_share = 0.2
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "c.toml"
    file.write_text(text)
    return file


def test_what_an_operator_says_reaches_the_node_s_terms(tmp_path: Path) -> None:
    config = load(written(tmp_path, FULL), environ={})
    terms = config.terms("n1")
    assert terms.prices == (
        Price(2.5), Price(0.4, "EUR", "NVIDIA L4", "spot", "allocated", int(NEW_YEAR) * SECOND),
    )  # fmt: skip
    assert (terms.node, terms.pool, terms.energy) == ("n1", "reserved", EnergyTerms(0.12, "EUR"))
    assert (terms.carbon, terms.idle_budget, terms.idle_budget_currency) == (CarbonIntensity(380), 100, "USD")
    assert terms.exemptions == (("eval", "nightly evaluation rests between runs", NEW_YEAR),)


def test_a_model_s_own_thresholds_stand_on_everybody_s(tmp_path: Path) -> None:
    own = load(written(tmp_path, FULL), environ={}).policies()
    assert [(name, p.hang_seconds, p.spin_power_share, p.spin_engine) for name, p in own.items()] == [
        ("NVIDIA L4", 200, 0.2, 0.98)
    ]


def test_without_prices_a_budget_is_in_gpu_hours(tmp_path: Path) -> None:
    terms = load(written(tmp_path, '[budget]\nidle_per_hour = 8\ncurrency = "USD"\n'), environ={}).terms("n1")
    assert (terms.idle_budget, terms.idle_budget_currency) == (8, "GPU-hours")


PRICE = '[[prices]]\nper_gpu_hour = 2.3\ncurrency = "{}"\n'
BUDGET = "[budget]\nidle_per_hour = 50\n"


@pytest.mark.parametrize(
    ("priced", "named", "currency"),
    [
        ("EUR", "", "EUR"),
        ("EUR", "EUR", "EUR"),
        ("EUR USD", "", "USD"),
        ("EUR USD", "EUR", "EUR"),
        ("CHF", "", "CHF"),
        ("EUR CHF", "", "CHF"),
    ],
)
def test_a_budget_is_in_a_currency_of_the_prices(tmp_path: Path, priced: str, named: str, currency: str) -> None:
    """Or nothing is compared with it, and the alert never fires."""
    text = "".join(map(PRICE.format, priced.split())) + BUDGET + (f'currency = "{named}"\n' if named else "")
    assert load(written(tmp_path, text), environ={}).terms("n1").idle_budget_currency == currency


def test_a_budget_of_the_file_may_have_its_currency_from_the_environment(tmp_path: Path) -> None:
    file, name = written(tmp_path, PRICE.format("EUR") + BUDGET + 'currency = "USD"'), "GPU_EFFICIENCY_BUDGET_CURRENCY"
    assert load(file, environ={name: "EUR"}).terms("n1").idle_budget_currency == "EUR"
    with pytest.raises(ConfigError, match=f"environment variable {name}: budget.currency: no row of .* is in CHF"):
        load(file, environ={name: "CHF"})


def test_a_currency_without_a_budget_is_no_mistake(tmp_path: Path) -> None:
    load(written(tmp_path, PRICE.format("EUR") + '[budget]\ncurrency = "USD"\n'), environ={})


_EXEMPTION = '[[exemptions]]\nid = "a"\nreason = "r"\nexpires = 2027-01-01\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[policy_by_model."NVIDIA L4"]\nhang_secs = 3', 'policy_by_model."NVIDIA L4": Object contains unknown field'),
        ('[policy_by_model."NVIDIA L4"]\nhang_seconds = 0', 'policy_by_model."NVIDIA L4": Expected `float` > 0.0'),
        ('[[prices]]\nmodel = "x"', "required field `per_gpu_hour` - at `$.prices[0]`"),
        ("[[prices]]\nper_gpu_hour = -1", ">= 0.0 - at `$.prices[0].per_gpu_hour`"),
        ('[[prices]]\nper_gpu_hour = 1\nbasis = "rented"', "Invalid enum value 'rented' - at `$.prices[0].basis`"),
        (
            PRICE.format("EUR") + BUDGET + 'currency = "USD"',
            "c.toml: line 6: budget.currency: no row of [[prices]] is in USD",
        ),
        (_EXEMPTION, "exemptions[0]: would exempt every job; give it one of job_id, namespace, partition"),
        (_EXEMPTION + 'user = "("', "exemptions[0].user: '(' is no regular expression"),
        ((_EXEMPTION + 'user = "a"\n') * 2, "exemptions[1]: there are two with the id 'a'"),
        ('[[exemptions]]\nid = "a"\nreason = "r"\nuser = "b"', "required field `expires` - at `$.exemptions[0]`"),
        ('[[exemptions]]\nid = "a"\nreason = ""\nexpires = 2027-01-01', "length >= 1 - at `$.exemptions[0].reason`"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text), environ={})
    assert why in str(caught.value)


def exemption(name: str, day: int, **patterns: str) -> Exemption:
    return Exemption(name, "because", datetime(2027, 1, day, tzinfo=UTC).date(), **patterns)


def exempted(owner: Owner, *exemptions: Exemption) -> tuple[str, float]:
    judged = Rules(None, exemptions).apply(owner)
    return judged.exemption, judged.exempt_until


def test_an_exemption_covers_whom_all_its_patterns_fit() -> None:
    one = exemption("a", 1, user="ada", partition="gpu-.*")
    assert exempted(Owner("1", user="ada", partition="gpu-long"), one) == ("a", NEW_YEAR)
    assert exempted(Owner("1", user="ada", partition="my-gpu-long"), one) == ("", 0.0)
    assert exempted(Owner("1", user="bob", partition="gpu-long"), one) == ("", 0.0)
    assert exempted(Owner("4711"), exemption("a", 1, job_id="4711")) == ("a", NEW_YEAR)


def test_of_several_exemptions_the_one_that_lasts_longest_counts() -> None:
    early, late = exemption("z", 1, user="ada"), exemption("b", 2, user="ada")
    assert exempted(Owner("1", user="ada"), late, early) == ("b", NEW_YEAR + 86400)


def test_a_rule_may_give_a_job_patience_of_its_own(tmp_path: Path) -> None:
    rules = load(written(tmp_path, '[[workload.rules]]\nhang_seconds = 900\npartition = "slow"\n'), environ={}).workload
    assert Rules(rules).apply(Owner("1", partition="slow")).hang_seconds == 900
    assert Rules(rules).apply(Owner("1", partition="fast")).hang_seconds is None


def test_the_daemon_logs_once_which_gpus_no_price_fits(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(meta=DaemonMetadata(terms=Terms(prices=(Price(2.0, model="NVIDIA H200"),))))
    agent.process(first([device()]))
    agent.process(first([device(), device("GPU-1", "1")]))
    (record,) = caplog.records
    assert f"no row of [[prices]] fits {device().model}" in record.getMessage()


def test_the_daemon_logs_once_which_prices_fit_no_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = ("*", "NVIDIA H200", "NVIDIA H1OO")
    rows = "".join(f'[[prices]]\nper_gpu_hour = 2\nmodel = "{model}"\n' for model in models)
    config = load(written(tmp_path, rows), environ={})
    agent = Agent(meta=DaemonMetadata(terms=config.terms("n1")))
    for _ in range(2):
        agent.process(first([device()]))
    (record,) = caplog.records
    assert record.getMessage().startswith("no GPU here is called NVIDIA H1OO, as rows of [[prices]] are")
