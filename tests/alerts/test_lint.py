"""Every rule names what exists and keeps clusters apart; the lint that says so reads PromQL and finds each fault."""

import pytest

from tests.alerts.lint import Rule, Series, faults, known_to, labels_of, rules
from tests.alerts.promql import Aggregate, Binary, Call, Literal, Matcher, Node, Selector, parse
from tests.each import each

RULES = rules()
KNOWN = known_to(RULES)


@each("rule", RULES, ids=lambda rule: f"{rule.file}-{rule.name}")
def test_a_rule_has_no_fault(rule: Rule) -> None:
    assert faults(rule, KNOWN) == []


def test_the_labels_of_every_record_are_known() -> None:
    assert [rule.name for rule in RULES if rule.record and KNOWN[rule.name].labels is None] == []


def test_no_record_is_made_twice() -> None:
    names = [rule.name for rule in RULES if rule.record]
    assert len(names) == len(set(names))


# -- the lint finds faults --

WORLD = {
    "x_total": Series(frozenset({"cluster", "instance", "leak", "gpu"}), "counter"),
    "g": Series(frozenset({"cluster", "instance"})),
    "info": Series(frozenset({"cluster", "instance", "node", "gpu"})),
    "state": Series(frozenset({"cluster", "instance", "state"})),
    "gpu_efficiency_cluster_node_state": Series(frozenset({"cluster", "node", "state"})),
    "any": Series(None),
}


def found(expr: str, name: str = "alert", text: str = "") -> list[str]:
    return faults(Rule("a.yaml", name, expr, ":" in name, text), WORLD)


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("y", "y: nobody exports it"),
        ('{cluster="a"}', "a selector without a name: nobody exports it"),
        ('g{gpu="0"}', "g has no label gpu"),
        ('x_total{leak=~"hung|idle"}', "leak is never idle"),
        ('state{state!="dead"}', "state is never dead"),
        ("rate(g[5m])", "rate of g, which is no counter"),
        ("deriv(x_total[5m])", "deriv of x_total, which is a counter"),
        ("sum(g)", "sum  () mixes clusters"),
        ("sum by (instance) (g)", "sum by (instance) mixes clusters"),
        ("max without (cluster) (g)", "max without (cluster) mixes clusters"),
        ("topk (1, g)", "topk  () mixes clusters"),
        ("sum by (cluster, node) (g)", "what sum is of has no label node"),
        ("g / on (instance) g", "/ on (instance) mixes clusters"),
        ("g and ignoring (cluster) g", "and ignoring (cluster) mixes clusters"),
        ("g * on (cluster, gpu) group_right () info", "what is left of * has no label gpu"),
        ("info * on (cluster, gpu) group_left () g", "what is right of * has no label gpu"),
        (
            "x_total * on (cluster, instance) group_left (gpus) info",
            "group_left or group_right takes from has no label",
        ),
        ("g / info", "/ never matches: cluster, instance against cluster, gpu, instance, node"),
        ("g unless info", "unless never matches"),
        ('absent(g{instance="a"})', "its result has lost the label cluster"),
    ],
)
def test_a_fault_is_found(expr: str, fault: str) -> None:
    assert any(fault in each for each in found(expr))


def test_a_fault_is_found_however_deep() -> None:
    assert found("g unless on (cluster) abs(-(sum by (cluster) (rate(g[5m])) > 0))") == [
        "rate of g, which is no counter"
    ]


@pytest.mark.parametrize(
    "expr",
    [
        "sum without (gpu, leak) (rate(x_total[5m]))",
        "x_total * on (cluster, instance, gpu) group_left (node) info",
        "100 * g > bool 1 or - g",
        "quantile_over_time(0.5, g[7d]) < 0.7 * g",
        'gpu_efficiency_cluster_node_state{state="down"}',
        'x_total{leak=~"(hung|.*_stall)"}',
        'sum by (cluster, anything) (any{whatever="1"})',
        'max by (cluster, role) (label_replace(g, "role", "$1", "instance", "(.*)-.*"))',
        "time() - g > 300",
    ],
)
def test_what_is_right_has_no_fault(expr: str) -> None:
    assert found(expr) == []


@pytest.mark.parametrize(
    ("name", "expr", "fault"),
    [
        ("node:g:sum", "sum by (cluster) (g)", "its level says instance/node, it has cluster"),
        ("cluster:g:sum", "g", "it has the label instance, of which its level says nothing"),
        ("rack:g:sum", "g", "rack is no level"),
        ("node:a:b:c", "g", "a record is named level:metric:operation"),
    ],
)
def test_a_record_s_level_is_that_of_its_labels(name: str, expr: str, fault: str) -> None:
    assert found(expr, name) == [fault]


def test_what_a_record_of_that_level_may_have() -> None:
    assert found("g", "node:g:sum") == found('x_total{gpu="0"}', "node_leak:x:sum") == []


def test_names_in_annotations_exist_too() -> None:
    said = '{{ query "sum(gpu_efficiency_cluster_node_state)" }} gpu_efficiency_nothing job:gpu_efficiency_x:y'
    assert [fault.split()[3] for fault in found("g", text=said)] == [
        "gpu_efficiency_nothing,", "job:gpu_efficiency_x:y,",
    ]  # fmt: skip


def test_a_record_has_the_labels_of_its_expression_whatever_the_order_of_rules() -> None:
    made = [
        Rule("a.yaml", "cluster:up:sum", "sum by (cluster) (node:up:max)", record=True, text=""),
        Rule(
            "b.yaml", "node:up:max", "max by (cluster, instance) (up)", record=True, text="", labels=frozenset({"of"})
        ),
        Rule("c.yaml", "node:self:max", "up or node:self:max", record=True, text=""),
        Rule("d.yaml", "node:egg:max", "node:hen:max", record=True, text=""),
        Rule("d.yaml", "node:hen:max", "node:egg:max", record=True, text=""),
    ]
    known = known_to(made)
    of_up = known["up"].labels
    assert [known[rule.name].labels for rule in made] == [{"cluster"}, {"cluster", "instance", "of"}, of_up, None, None]


@pytest.mark.parametrize(
    ("expr", "labels"),
    [
        ("info", {"cluster", "instance", "node", "gpu"}),
        ("topk by (cluster) (1, g)", {"cluster", "instance"}),
        ("g > on (cluster) g", {"cluster"}),
        ("g - ignoring (instance) g", {"cluster"}),
        ("g * on (cluster, instance) group_right () info", {"cluster", "instance", "node", "gpu"}),
        ("g or info", {"cluster", "instance", "node", "gpu"}),
        ("info unless on (cluster) g", {"cluster", "instance", "node", "gpu"}),
        ("1 - -g", {"cluster", "instance"}),
        ("vector(1)", set()),
    ],
)
def test_labels_of_a_result(expr: str, labels: set[str]) -> None:
    assert labels_of(parse(expr), WORLD) == frozenset(labels)


# -- the parser --


def test_precedence() -> None:
    a, b, c = Selector("a"), Selector("b"), Selector("c")
    trees: dict[str, Node] = {
        "a - b - c": Binary("-", Binary("-", a, b), c),
        "a + b * c": Binary("+", a, Binary("*", b, c)),
        "a ^ b ^ c": Binary("^", a, Binary("^", b, c)),
        "-a ^ b": Call("neg", (Binary("^", a, b),)),
        "a or b and c": Binary("or", a, Binary("and", b, c)),
        "a and b unless c": Binary("unless", Binary("and", a, b), c),
        "a > b + c": Binary(">", a, Binary("+", b, c)),
        "a * (b + c)": Binary("*", a, Binary("+", b, c)),
    }
    assert {text: parse(text) for text in trees} == trees


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("sum by(a,b,)(x)", Aggregate("sum", "by", ("a", "b"), (Selector("x"),))),
        ("SUM(x) BY (a)", Aggregate("sum", "by", ("a",), (Selector("x"),))),
        ("topk without (a) (3, x)", Aggregate("topk", "without", ("a",), (Literal("3"), Selector("x")))),
        ("sum", Selector("sum")),
        ("level:by:rate5m{}", Selector("level:by:rate5m")),
        ("infinity_total", Selector("infinity_total")),
        ("inf:total", Selector("inf:total")),
        ("x[1h30m]", Selector("x", (), "[1h30m]")),
        ("x[1d:5m] offset -1h", Call("subquery", (Selector("x"), Literal("[1d:5m]")))),
        ("(x)[1h:]", Call("subquery", (Selector("x"), Literal("[1h:]")))),
        ("x @ end() # last\n", Selector("x")),
        ("x @ 1e9 offset 5m", Selector("x")),
        ("f(.5e-3, 'it\\'s', `a\\`)", Call("f", (Literal(".5e-3"), Literal("'it\\'s'"), Literal("`a\\`")))),
        ('{a="b"}', Selector("", (Matcher("a", "=", "b"),))),
        (
            "x{on=\"#\",by!~'a{1,2}|(b)',}",
            Selector("x", (Matcher("on", "=", "#"), Matcher("by", "!~", "a{1,2}|(b)"))),
        ),
        (
            "a / on (c) group_left b",
            Binary("/", Selector("a"), Selector("b"), "on", ("c",), "left"),
        ),
        (
            "a ^ ignoring (c) group_right (d, e) b",
            Binary("^", Selector("a"), Selector("b"), "ignoring", ("c",), "right", ("d", "e")),
        ),
        ("a >= bool 0x1F", Binary(">=", Selector("a"), Literal("0x1F"))),
    ],
)
def test_tricky_text_is_read(text: str, tree: Node) -> None:
    assert parse(text) == tree


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "wanted an expression, found 'the end'"),
        ("a b", "wanted the end, found 'b' (column 3"),
        ("sum(a", "wanted ',', found 'the end'"),
        ("a{b=c}", "wanted a string, found 'c'"),
        ("a{b}", "wanted = != =~ or !~"),
        ("a + ", "wanted an expression"),
        ("sum by a (b)", "wanted '('"),
        ("a[5x]", "nothing in PromQL begins like '[5x]'"),
        ('a{b="c', "nothing in PromQL begins like"),
        ("(a + b)[5m]", "wanted the end, found '[5m]'"),
        ("a offset b", "wanted a number, found 'b'"),
    ],
)
def test_what_is_no_promql_is_refused_with_its_place(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"column \d+") as raised:
        parse(text)
    assert complaint in str(raised.value)
