"""PromQL text -> a tree, as much of it as rules are written in.

Owns the grammar: selectors, ranges, subqueries, modifiers, calls, aggregations with their clause before or after, and
binary operators with their precedence and matching (Prometheus 2.42, "Querying basics", "Operators"). Refuses to know
any metric, to evaluate, and to judge types: promtool does that. What it does not know it refuses with its place.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

AGGREGATORS = frozenset({
    "sum", "min", "max", "avg", "group", "stddev", "stdvar", "count", "count_values", "bottomk", "topk", "quantile",
})  # fmt: skip
SET_OPERATORS = frozenset({"and", "or", "unless"})
_DURATION = r"(?:\d+(?:ms|[smhdwy]))+"
_TOKEN = re.compile(
    rf"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<range>\[\s*{_DURATION}\s*(?P<sub>:\s*(?:{_DURATION})?\s*)?\])
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`)
    |(?P<number>0[xX][0-9a-fA-F]+|{_DURATION}|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|(?i:inf|nan)\b(?![:]))
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    |(?P<mark>=~|!~|==|!=|<=|>=|[-+*/%^(){{}},=<>@])""",
    re.VERBOSE,
)
_ORDER = (
    frozenset({"or"}),
    frozenset({"and", "unless"}),
    frozenset({"==", "!=", "<=", "<", ">=", ">"}),
    frozenset({"+", "-"}),
    frozenset({"*", "/", "%", "atan2"}),
)
"""Binary operators from the loosest; `^` binds tighter than all of them, and to the right."""


class Matcher(NamedTuple):
    """One condition in braces."""

    label: str
    operator: str
    value: str


class Selector(NamedTuple):
    """Series by name and labels, over `range` (with its brackets) or, without one, at a moment."""

    name: str
    matchers: tuple[Matcher, ...] = ()
    range: str = ""


class Literal(NamedTuple):
    """A number or a string, as written."""

    text: str


class Call(NamedTuple):
    """A function; `subquery` is one too, of the expression it runs over. A sign before a vector is `neg`."""

    name: str
    args: tuple["Node", ...]


class Aggregate(NamedTuple):
    """`clause` is by, without, or empty; parameters such as topk's come first in `args`."""

    operator: str
    clause: str
    labels: tuple[str, ...]
    args: tuple["Node", ...]


class Binary(NamedTuple):
    """`match` is on, ignoring, or empty; `group` left, right, or empty."""

    operator: str
    left: "Node"
    right: "Node"
    match: str = ""
    labels: tuple[str, ...] = ()
    group: str = ""
    include: tuple[str, ...] = ()


Node = Selector | Literal | Call | Aggregate | Binary


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


@cache
def parse(text: str) -> Node:
    """Read one expression. Raises ValueError with the place of what cannot be read."""
    reader = _Reader(list(_tokens(text)), text)
    node = reader.binary(0)
    if reader.token.kind != "end":
        raise reader.wrong("the end")
    return node


def walk(node: Node) -> Iterator[Node]:
    """Every node, the outermost first."""
    yield node
    if isinstance(node, Binary):
        yield from walk(node.left)
        yield from walk(node.right)
    elif isinstance(node, Call | Aggregate):
        for each in node.args:
            yield from walk(each)


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"nothing in PromQL begins like {text[at : at + 20]!r} (column {at + 1} of {text!r})")
        kind = "subquery" if found["sub"] else str(found.lastgroup)
        kind = "range" if kind == "sub" else kind
        if kind != "space":
            yield _Token(kind, found[0], at)
        at = found.end()
    yield _Token("end", "", at)


class _Reader:
    """A place in a list of tokens, and the grammar's rules as methods: each reads what it is named for."""

    def __init__(self, tokens: list[_Token], text: str) -> None:
        self._tokens = tokens
        self._text = text
        self._next = 0

    @property
    def token(self) -> _Token:
        return self._tokens[self._next]

    def wrong(self, wanted: str) -> ValueError:
        found = self.token.text or "the end"
        return ValueError(f"wanted {wanted}, found {found!r} (column {self.token.at + 1} of {self._text!r})")

    def _take(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1].text

    def _is(self, *texts: str) -> bool:
        return self.token.kind in {"mark", "name"} and self.token.text.lower() in texts

    def _took(self, *texts: str) -> bool:
        found = self._is(*texts)
        self._next += found
        return found

    def _expect(self, text: str) -> None:
        if not self._took(text):
            raise self.wrong(repr(text))

    def _kind(self, kind: str) -> str:
        if self.token.kind != kind:
            raise self.wrong(f"a {kind}")
        return self._take()

    def binary(self, level: int) -> Node:
        if level == len(_ORDER):
            return self._sign()
        left = self.binary(level + 1)
        while self._is(*_ORDER[level]):
            operator = self._take().lower()
            left = self._matched(operator, left, level + 1)
        return left

    def _matched(self, operator: str, left: Node, level: int | None) -> Binary:
        """Everything from a binary operator's modifiers to the end of its right side; None: of a power."""
        self._took("bool")
        match, labels, group, include = "", (), "", ()  # type: tuple[str, tuple[str, ...], str, tuple[str, ...]]
        if self._is("on", "ignoring"):
            match, labels = self._take().lower(), self._labels()
        if self._is("group_left", "group_right"):
            group = self._take().lower().removeprefix("group_")
            include = self._labels() if self._is("(") else ()
        right = self._sign() if level is None else self.binary(level)
        return Binary(operator, left, right, match, labels, group, include)

    def _sign(self) -> Node:
        if self._is("-", "+"):
            negative = self._take() == "-"
            inner = self._sign()
            return Call("neg", (inner,)) if negative else inner
        base = self._suffixed(self._primary())
        if self._took("^"):
            return self._matched("^", base, None)
        return base

    def _primary(self) -> Node:
        kind, text, _ = self.token
        if self._took("("):
            inner = self.binary(0)
            self._expect(")")
            return inner
        if kind in {"number", "string"}:
            return Literal(self._take())
        if kind == "name":
            return self._named(self._take())
        if text == "{":
            return Selector("", self._matchers())
        raise self.wrong("an expression")

    def _named(self, name: str) -> Node:
        if name.lower() in AGGREGATORS and self._is("(", "by", "without"):
            return self._aggregate(name.lower())
        if self._is("("):
            return Call(name, self._args())
        return Selector(name, self._matchers() if self._is("{") else ())

    def _aggregate(self, operator: str) -> Aggregate:
        clause, labels = self._clause()
        args = self._args()
        if not clause:
            clause, labels = self._clause()
        return Aggregate(operator, clause, labels, args)

    def _clause(self) -> tuple[str, tuple[str, ...]]:
        return (self._take().lower(), self._labels()) if self._is("by", "without") else ("", ())

    def _args(self) -> tuple[Node, ...]:
        self._expect("(")
        found: list[Node] = []
        while not self._took(")"):
            found.append(self.binary(0))
            if not self._is(")"):
                self._expect(",")
        return tuple(found)

    def _labels(self) -> tuple[str, ...]:
        self._expect("(")
        found: list[str] = []
        while not self._took(")"):
            found.append(self._kind("name"))
            if not self._is(")"):
                self._expect(",")
        return tuple(found)

    def _matchers(self) -> tuple[Matcher, ...]:
        self._expect("{")
        found: list[Matcher] = []
        while not self._took("}"):
            label = self._kind("name")
            if not self._is("=", "!=", "=~", "!~"):
                raise self.wrong("= != =~ or !~")
            found.append(Matcher(label, self._take(), self._kind("string")[1:-1]))
            if not self._is("}"):
                self._expect(",")
        return tuple(found)

    def _suffixed(self, node: Node) -> Node:
        while True:
            if self.token.kind == "range" and isinstance(node, Selector) and not node.range:
                node = node._replace(range=self._take())
            elif self.token.kind == "subquery":
                node = Call("subquery", (node, Literal(self._take())))
            elif self._took("offset"):
                self._took("-")
                self._kind("number")
            elif self._took("@"):
                self._moment()
            else:
                return node

    def _moment(self) -> None:
        if self._is("start", "end"):
            self._take()
            self._labels()
        else:
            self._took("-")
            self._kind("number")
