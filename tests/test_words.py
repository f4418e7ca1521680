"""Pages, docstrings and messages speak as torch's own documentation does: some words have better ones."""

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest
from prose import INSTEAD, OFF, PAGES, PHRASES, avoided, findings, places, prose
from test_docstrings import PUBLIC

from leannorm.saving import reasons

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "leannorm"


def found_in(page, words=INSTEAD):
    return {word: better for _, word, better in places(prose(page), words)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_word_for_which_there_is_a_better_one(page):
    assert found_in(page.read_text(), avoided(page)) == {}


def test_such_a_word_is_found_in_prose_alone():
    assert set(found_in("Bytes held, of stock's, beside torch")) == {"stock", "held", "beside"}
    assert found_in("`lean(held=hooks)` keeps a mushroom; see [more](rooms.md)\n\n    what is held\n") == {}


WRONG = """## Held
Held in `the the` place, it is is kept \\
    for free for free

`!!!` A fix for the the price of very much (a multiply-add in the ResNet-50's "head"...).
"""


def test_the_checker_of_pages_finds_what_readers_do_not_read_as_english():
    pytest.importorskip("proselint")
    found = findings(ROOT / "page.md", WRONG)
    assert [line for line, _ in found] == [1, 2, 2, 5, 5]
    assert sum("write kept" in message for _, message in found) == 2
    assert sum("lexical_illusions" in message for _, message in found) == 2
    assert sum("weasel_words.very" in message for _, message in found) == 1


def test_each_rule_that_is_off_would_find_something():
    pytest.importorskip("proselint")
    said = [message for page in PAGES for _, message in findings(page, page.read_text(), off=())]
    assert {message.rpartition("(")[2].rstrip(")") for message in said} == {*OFF}
    assert all(OFF.values())


def documented(name):
    """The docstrings that `help()` shows of a public name: its own, and those of its public methods."""
    value = PUBLIC[name]
    methods = vars(value) if inspect.isclass(value) else {}
    yield name, inspect.getdoc(value)
    for of, method in methods.items():
        if not of.startswith("_") and getattr(method, "__doc__", None) and not isinstance(method, str):
            yield f"{name}.{of}", inspect.getdoc(method)


def words_of(docstring):
    """Its sentences, without the names of arguments, the example and what makes the text look like code."""
    text = docstring.partition(">>>")[0]
    text = re.sub(r"(?m)^ {4}[\w, ]+:(?= )", "", text)
    return "\n".join(line.lstrip() for line in text.splitlines())


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_has_no_such_word(name):
    assert {of: found_in(words_of(text)) for of, text in documented(name) if found_in(words_of(text))} == {}


def messages(source):
    """The text of each error that is raised and of each warning, and the helps of the command's options."""
    for node in ast.walk(ast.parse(source)):
        raised = isinstance(node, ast.Raise) and node.exc is not None
        if not raised and not (isinstance(node, ast.Call) and ast.unparse(node.func) in SAYING):
            continue
        pieces = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
        yield node.lineno, "".join(piece for piece in pieces if isinstance(piece, str))


SAYING = {"warnings.warn", "typer.Option", "typer.Argument", "Line", "Fact", "progress"}
OTHERS = {"moved.py"}  # of saving/: their messages name the argument held


@pytest.mark.parametrize("room", sorted(p.name for p in SOURCE.iterdir() if p.suffix in ("", ".py")))
def test_a_message_has_no_such_word(room):
    files = [SOURCE / room] if room.endswith(".py") else sorted((SOURCE / room).rglob("*.py"))
    found = {
        f"{path.relative_to(SOURCE)}:{line}": words
        for path in files
        if not (room == "saving" and path.name in OTHERS)
        for line, text in messages(path.read_text())
        if (words := found_in(text))
    }
    assert found == {}


def test_a_reason_has_no_such_word():
    text = [v for v in vars(reasons).values() if isinstance(v, str) and " " in v]
    text += [why.sentence for why in reasons.Why]
    of_functions = [
        node.value
        for function in ast.walk(ast.parse(inspect.getsource(reasons)))
        if isinstance(function, ast.FunctionDef)
        for statement in function.body[1:]
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(text) > 20
    said = (re.sub(r"lean\(held=.*?\)\)", "", one) for one in (*text, *of_functions))
    assert [one for one in said if found_in(one)] == []


def test_such_a_word_is_found_in_docstrings_and_messages():
    docstring = "Keep.\n\n    Args:\n    held: what is held.\n\n>>> stock = 1\n"
    assert set(found_in(words_of(docstring))) == {"held"}
    source = 'def f():\n    if x:\n        raise E(f"{a} of stock\'s, {b} beside")\n    raise E(g("told"))\n'
    found = {line: set(found_in(text)) for line, text in messages(source)}
    assert found == {3: {"stock", "beside"}, 4: {"told"}}


def remarks(path):
    """Line and text of each comment and docstring, without examples and names of code."""
    source = path.read_text()
    if path.suffix != ".py":
        comments = re.finditer(r"//(.*)", source)
        texts = [(source.count("\n", 0, one.start()) + 1, one[1]) for one in comments]
    else:
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts = [(one.start[0], one.string) for one in tokens if one.type == tokenize.COMMENT]
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
        having = [node for node in ast.walk(ast.parse(source)) if isinstance(node, nodes)]
        texts += [
            (node.body[0].lineno, words_of(ast.get_docstring(node) or "")) for node in having if node.body
        ]
    return [(line, re.sub(r"[\w.]+\(|\w+\.\w+|^ *\w+(?= +-> )", "", text)) for line, text in texts]


SCRIPTS = [*sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
SOURCES = [
    ROOT / "setup.py",
    *SCRIPTS,
    *sorted((ROOT / "site").glob("*.py")),
    *sorted(SOURCE.rglob("*.py")),
    *(p for p in sorted((ROOT / "csrc").rglob("*.*")) if p.suffix != ".md"),
]
ASKING = r"(?:# |// )?(?:Is|Has|Have|Does|May|Was|Were|Should) [^.;]*\?"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_comment_has_no_such_word(path):
    said = [(line, found_in(text, INSTEAD | PHRASES)) for line, text in remarks(path)]
    assert [(line, words) for line, words in said if words] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_function_that_answers_yes_or_no_says_whether(path):
    """Only a package asks (`tests/test_architecture.py`): its first line is what a reader looks for."""
    assert [(line, text) for line, text in remarks(path) if line > 1 and re.match(ASKING, text.strip())] == []


def words_in(node):
    """The strings below a node that are printed as they are: no keys, and no values of f-strings."""
    if isinstance(node, ast.Constant):
        yield node.value if isinstance(node.value, str) else ""
    elif isinstance(node, ast.Subscript | ast.Compare):
        return
    elif not isinstance(node, ast.FormattedValue) or isinstance(node.value, ast.Constant | ast.IfExp):
        for child in ast.iter_child_nodes(node):
            yield from words_in(child)


def printed(source):
    """Line and text of what a script prints, of the helps of its options, and of what ends it."""
    for node in ast.walk(ast.parse(source)):
        calls = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in PRINTING
        if calls or (isinstance(node, ast.Raise) and node.exc is not None):
            yield node.lineno, " ".join(words_in(node))


PRINTING = {"print", "add_argument", "note", "wrong"}  # the last two are a report's


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_prints_no_such_word(path):
    said = [(line, found_in(text, INSTEAD | PHRASES)) for line, text in printed(path.read_text())]
    assert [(line, words) for line, words in said if words] == []


def test_such_a_word_is_found_in_what_a_script_prints():
    source = """
print(f"{row['held']} kept, {'held':>8} of {stock} {'told' if a == 'mend' else 'room'}")
parser.add_argument("--json", help="in place of a file")
parser.parse_args(["held"])
raise SystemExit(f"{name} is wanted")
"""
    found = {line: set(found_in(text, INSTEAD | PHRASES)) for line, text in printed(source)}
    assert found == {2: {"held", "told", "room"}, 3: {"in place of"}, 5: {"wanted"}}


def test_such_words_are_found_in_comments(tmp_path):
    (tmp_path / "a.py").write_text(
        'import a\n\n\ndef held():  # in place of stock\n    """Is it told?\n\n    >>> mend(held)\n    """\n'
    )
    (tmp_path / "a.h").write_text("// told(node): what is kept\nint held;  // whoever calls\n")
    found = {name: dict(remarks(tmp_path / name)) for name in ("a.py", "a.h")}
    assert found["a.py"] == {4: "# in place of stock", 1: "", 5: "Is it told?\n"}
    assert set(found_in(found["a.py"][4], INSTEAD | PHRASES)) == {"in place of", "stock"}
    assert re.match(ASKING, found["a.py"][5])
    assert [set(found_in(text, INSTEAD | PHRASES)) for text in found["a.h"].values()] == [set(), {"whoever"}]


def test_a_change_is_one_line():
    for line in (ROOT / "CHANGELOG.md").read_text().splitlines():
        assert len(line) <= 160, line
    unreleased = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert re.findall(r"(?m)^### (.*)$", unreleased) == ["Added", "Changed", "Fixed"]


def test_the_faq_quotes_what_reasons_say():
    """Whoever searches the page for the sentence that was printed finds it."""
    source = re.sub(r'"\s*\n\s*f?[\'"]', "", inspect.getsource(reasons))
    parts = (ROOT / "docs" / "faq.md").read_text().split("\n## ")
    rows = "\n".join(part for part in parts if "`saved.reasons` says |" in part)
    quoted = [
        quote for row in re.findall(r"(?m)^\| (`.*?`) \|", rows) for quote in row.strip("`").split("`, `")
    ]
    assert len(quoted) > 12
    for quote in quoted:
        for words in quote.split("..."):
            assert words.strip("= ") in source, quote
