"""The templates use no function that Helm 3 lacks; that one itself could not be run here."""

import re

from tests.helm.rendering import CHART

LANGUAGE = {
    "if", "else", "end", "range", "with", "define", "include", "and", "or", "not", "eq", "ne", "lt", "gt", "len",
    "index", "print", "printf", "true", "false",
}  # fmt: skip
"""Of Go's templates, and Helm's include."""
HELM = {"toYaml", "fromYaml", "toJson", "fromJson", "toToml", "required", "fail", "tpl"}
"""Of Helm's own since 3.0."""
SPRIG = {
    "append", "base", "concat", "contains", "deepCopy", "default", "dict", "dig", "empty", "first", "floor", "get",
    "has", "hasKey", "hasPrefix", "int", "int64", "join", "kindIs", "last", "list", "merge", "nindent",
    "omit", "pick", "quote", "regexFind", "regexReplaceAll",
    "replace", "semverCompare", "set", "sha256sum", "sortAlpha",
    "splitList", "sub", "ternary", "toString", "trim", "trimPrefix", "trimSuffix", "trunc", "uniq", "unset",
}  # fmt: skip
"""Of Sprig 3.2, which Helm has since 3.5; the youngest of them is dig."""


def _functions(text: str) -> set[str]:
    """Words in the actions of a template that are neither fields, variables, texts nor comments."""
    actions = re.findall(
        r"\{\{-?(?!\s*/\*)(.*?)-?\}\}", re.sub(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", "", text, flags=re.DOTALL)
    )
    bare = [re.sub(r"\"(?:\\.|[^\"\\])*\"", " ", action) for action in actions]
    return {word for action in bare for word in re.findall(r"(?<![.$\w])[A-Za-z]\w*", action)}


def test_templates_use_functions_of_helm_3() -> None:
    used = {word for path in (CHART / "templates").iterdir() for word in _functions(path.read_text())}
    assert used - LANGUAGE - HELM == SPRIG
    assert used > HELM


def test_the_reader_of_templates_sees_a_function() -> None:
    assert _functions('{{- /* mustToToml */ -}}{{ .a | mustToToml "b" $c.d }}{{ (lookup "v1").e }}') == {
        "mustToToml",
        "lookup",
    }
