"""The tree keeps its shape: imports go one way, files stay short, exports are complete, imports are cheap."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import leannorm
from leannorm.ops import schema
from leannorm.ops.activation import ACTIVATIONS

SOURCE = Path(leannorm.__file__).parent
ROOT = Path(__file__).parent.parent
# what a room may import stands before it; rooms of one set do not know each other
ORDER = [
    {"_errors", "_lazy", "_torch", "_types", "_version"},
    {"_batch", "_files", "_freed_memory", "_report", "planning"},
    {"ops"},
    {"_checks", "_untouched", "distributed"},
    {"autograd"},
    {"functional"},
    {"nn"},
    {"_catalog", "head"},
    {"saving", "program"},
    {"compiled"},
    {"transforms"},
    {"report"},
    {"interop"},
    {"cli"},
    {"__main__"},
]
# the same within a room that has rooms of its own
INNER = {
    "transforms": [
        {"derived"},
        {"recognizing", "fusing"},
        {"converting"},
        {"folding", "statistics"},
        {"__init__"},
    ],
    "interop": [{"checkpoints", "lightning", "transformers"}, {"__init__"}],
}
# rooms that training needs nothing of: `later` imports them where somebody asks for a name of theirs
LATE = ("cli", "interop.checkpoints", "program", "report", "transforms.folding")
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE or p.stem != "__init__")


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def root_places():
    """What stands behind each name that the package root offers."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            for alias in node.names:
                path = f"{node.module}.{alias.name}".split(".")
                assert path[0] == "leannorm"
                yield alias.asname or alias.name, ".".join(path[1:-1] or path[1:])
        elif isinstance(node, ast.Assign):
            yield from ((target.id, "_errors") for target in node.targets)  # no room stands behind it


PLACES = dict(root_places())
ROOT_NAMES = {name: place.split(".")[0] for name, place in PLACES.items()}


def imported_rooms(path, text=None):
    """The rooms that a file imports, those included whose names it takes from the package root."""
    for node in ast.walk(ast.parse(text or path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "a relative import"
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "leannorm":
            parts = node.module.split(".")
            names = parts[1:2] or [alias.name for alias in node.names]
            yield from (ROOT_NAMES.get(name, name) for name in names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "leannorm":  # the root alone is every room
                    yield parts[1] if len(parts) > 1 and alias.asname else "the whole package"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    here = room(path)
    for other in imported_rooms(path):
        assert other in LEVEL, f"{here} imports {other}"
        assert other == here or LEVEL[other] < LEVEL[here], f"{here} may not import {other}"


def is_late(module):
    return any(f"{module}.".startswith(f"{name}.") for name in LATE)


def late_imports(path, text=None):
    """The imports of a late room that a file runs, with the function that they stand in."""

    def visit(node, function):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        function = getattr(node, "name", function) if isinstance(node, ast.FunctionDef) else function
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module == "leannorm":
            modules = [f"leannorm.{PLACES.get(alias.name, alias.name)}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            if is_late(module.removeprefix("leannorm.")):
                yield module, function
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return list(visit(ast.parse(text or path.read_text()), None))


CORE = [p for p in FILES if not is_late(".".join(p.relative_to(SOURCE).with_suffix("").parts))]
DOORS = [p for p in SOURCE.rglob("__init__.py") if "later(__name__" in p.read_text()]


@pytest.mark.parametrize("path", [*CORE, SOURCE / "__init__.py"], ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_core_imports_no_late_room(path):
    """A trainer's callback runs the doctor, and imports it then; `python -m leannorm` is the command."""
    allowed = {"__main__": {None}, "lightning": {"on_train_start"}, "transformers": {"on_train_begin"}}
    found = {function for _, function in late_imports(path)}
    assert found <= allowed.get(path.stem, set()), late_imports(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from leannorm.program.memory import arguments", [("leannorm.program.memory.arguments", None)]),
        ("def f():\n    from leannorm import fold", [("leannorm.transforms.folding.fold", "f")]),
        ("import leannorm.report", [("leannorm.report", None)]),
        ("from leannorm.transforms import folding", [("leannorm.transforms.folding", None)]),
        ("from leannorm.compiled.report import Planned", []),
        ("if TYPE_CHECKING:\n    from leannorm import fit", []),
    ],
)
def test_an_import_of_a_late_room_is_found(text, found):
    assert late_imports(None, text) == found


@pytest.mark.parametrize("path", DOORS, ids=lambda p: str(p.relative_to(SOURCE)))
def test_type_checkers_see_what_comes_late(path):
    """The imports that stand below `if TYPE_CHECKING` are those that `later` makes."""
    package = ".".join(("leannorm", *path.relative_to(SOURCE).parts[:-1]))
    tree = ast.parse(path.read_text())
    (branches,) = (n for n in tree.body if isinstance(n, ast.If))
    shown = {a.name: n.module for n in branches.body for a in n.names}
    places = ast.literal_eval(branches.orelse[0].value.args[1])
    made = {name: f"{package}.{place}".rstrip(".") for name, place in places.items()}
    assert made == shown


def test_an_import_loads_no_late_room_and_every_operator():
    """An exported graph has operators by name: it must run where nobody has asked for a late room."""
    code = """
import sys, torch
def here():
    return {m for m in sys.modules if m.startswith("leannorm.")}
def operators():
    return {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("leannorm::")}
import leannorm
print(*sorted(here()), sep="\\n")
before = operators()
import leannorm.cli.app
for name in leannorm.__all__:
    getattr(leannorm, name)
for name in leannorm.interop.__all__:
    getattr(leannorm.interop, name)
assert {"leannorm.report.fit", "leannorm.program", "leannorm.interop.checkpoints.files"} <= here()
assert operators() == before, operators() - before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = [module.removeprefix("leannorm.") for module in done.stdout.split()]
    assert "saving.context" in loaded
    assert not [module for module in loaded if is_late(module) or module.startswith("interop")]


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p) in INNER], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_imports_within_a_room_go_one_way(path):
    levels = {inner: level for level, rooms in enumerate(INNER[room(path)]) for inner in rooms}
    here = path.relative_to(SOURCE).parts[1].removesuffix(".py")
    for other in set(re.findall(rf"leannorm\.{room(path)}(?:\.| import )(\w+)", path.read_text())):
        if other in levels:
            assert other == here or levels[other] < levels[here], f"{here} may not import {other}"
    assert here in levels


def test_other_frameworks_checkpoints_are_imported_where_they_are_asked_for():
    """By `leannorm.interop`, which offers them, and by the command that converts them."""
    users = {p for p in FILES if "interop.checkpoints" in p.read_text() and p.parent.name != "checkpoints"}
    assert {str(p.relative_to(SOURCE)) for p in users} == {"interop/__init__.py", "cli/convert_checkpoint.py"}


@pytest.mark.parametrize("name", ["transforms", "report", "interop", "cli", "program"])
def test_a_room_says_its_question(name):
    """In its first line, and so do the rooms in it."""
    for path in (SOURCE / name).rglob("__init__.py"):
        assert "?" in ast.get_docstring(ast.parse(path.read_text())).splitlines()[0], path


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("from leannorm import convert", "transforms"),
        ("def f():\n    from leannorm import lean as l", "saving"),
        ("from leannorm import nn", "nn"),
        ("from leannorm.report.timing import paired", "report"),
        ("import leannorm.saving.hooks as hooks", "saving"),
        ("import leannorm", "the whole package"),
        ("from . import nn", "a relative import"),
    ],
)
def test_an_import_through_the_root_is_that_of_a_room(text, other):
    assert list(imported_rooms(None, text)) == [other]


def test_every_room_has_its_place():
    rooms = {room(path) for path in FILES}
    assert rooms == set(LEVEL)


def test_one_exporter_makes_every_graph():
    users = {p.stem for p in FILES if "AsOperators()" in p.read_text()}
    assert users == {"exporter"}


def test_backends_do_not_import_each_other():
    """Each is made of what stands before it, and those with kernels know nothing of each other."""
    folder = SOURCE / "ops" / "backends"
    before = [
        "reference_rows",
        "reference_gated",
        "reference",
        "backend",
        "compiled",
        "compiled_gated",
        "shown",
    ]
    of = {name: before[:i] for i, name in enumerate(before)} | {"library": []}
    of |= {"native": [], "aten_rows": [*before, "native"], "aten": [*before, "native", "aten_rows"]}
    of |= {"cpu": [*before, "library"], "triton": [*before, "triton"]}
    names = {p.stem for p in folder.iterdir()} - {"__init__", "__pycache__"}
    assert names == set(of)
    for path in set(folder.rglob("*.py")) - {folder / "__init__.py"}:
        text, here = path.read_text(), path.relative_to(folder).parts[0].removesuffix(".py")
        imported = re.findall(r"from leannorm\.ops\.backends(?:\.| import )(\w+)", text)
        assert set(imported) <= set(of[here]), path


ACTIVATION_FILES = {
    "src/leannorm/ops/activation.py",
    "src/leannorm/ops/backends/triton/activations.py",
    "csrc/activation.h",
    "csrc/activations.h",
    "docs/batch_norm_act.md",
}


@pytest.mark.skipif(not SOURCE.is_relative_to(ROOT), reason="an installed copy is no part of the tree")
def test_an_activation_is_named_in_five_files():
    """ELU, of which nothing else in the library knows, in no other; DESIGN.md says the number."""
    files = [*SOURCE.rglob("*.py"), *(ROOT / "csrc").rglob("*.*"), *(ROOT / "docs").glob("*.md")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}

    def naming(name):
        enumerator = "k" + "".join(word.capitalize() for word in name.split("_"))
        return {file for file, text in texts.items() if re.search(rf'["`]{name}["`]|\b{enumerator}\b', text)}

    assert naming("elu") == ACTIVATION_FILES
    for name in [*ACTIVATIONS][1:]:
        assert naming(name) >= ACTIVATION_FILES, name


BESIDE = "shown.py", "aten.py", "aten_rows.py", "native.py", "as_given.py"


def test_an_operator_is_named_in_few_files_of_the_kernels():
    """A new one needs six: the reference, the schema, the call, C++, and Triton's operator and kernel.

    Beside them `shown.py` may write it out for compilers, `aten.py` for torch's kernels, and the fast path
    may hand it over.
    """
    files = [*(SOURCE / "ops").rglob("*.py"), *(ROOT / "csrc").glob("*.cpp")]
    texts = {path: path.read_text() for path in files if path.name not in BESIDE}
    for operator in (*schema.OPERATORS, *schema.BETWEEN):
        assert sum(bool(re.search(rf"\b{operator}\b", text)) for text in texts.values()) <= 6, operator


def test_nodes_of_autograd_are_named_in_one_file():
    """`lean()` knows operators, by one table; only stand-ins for dropped tensors ask which node reads."""
    files = [*SOURCE.rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
    naming = {path.name for path in files if re.search(r"\w+Backward\d", path.read_text())}
    assert naming == {"unbuilt.py"}


def test_no_file_is_long():
    tracked = [*SOURCE.rglob("*.py"), *(ROOT / "csrc").rglob("*.*"), *(ROOT / "tests").rglob("*.py")]
    tracked += (ROOT / "benchmarks").rglob("*.py")
    long = {str(p.relative_to(ROOT)): n for p in tracked if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def modules():
    return [leannorm, *(importlib.import_module(f"leannorm.{name}") for name in ("functional", "nn"))]


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.__name__)
def test_exports_are_complete_sorted_and_documented(module):
    assert all(hasattr(module, name) for name in module.__all__)  # some come with their first use
    public = {k for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, type(sys))}
    rooms = {m.name for m in pkgutil.iter_modules(module.__path__)}
    assert set(module.__all__) - rooms == public - rooms - {"annotations", "later", "TYPE_CHECKING"}
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


EXTRAS = [
    "h5py",
    "jinja2",
    "matplotlib",
    "msgpack",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "plotly",
    "rich",
    "safetensors",
    "sklearn",
    "timm",
]
EXTRAS += ["torchvision", "triton", "typer"]


def test_a_fresh_import_needs_no_extra():
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {EXTRAS}:
            raise ModuleNotFoundError(f'{{name}} is blocked')
import torch
already = set(sys.modules)
sys.meta_path.insert(0, Block())
import leannorm
x = torch.randn(4, 3, 2, 2)
leannorm.nn.BatchNorm2d(3)(x)
new = set(sys.modules) - already
heavy = {{'torch._dynamo', 'torch._inductor'}}
print(sorted(({{m.split('.')[0] for m in new}} & set({EXTRAS})) | (new & heavy)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_machine_without_triton_says_so_and_normalizes():
    """And one with it does not import it before a kernel is called."""
    code = """
import sys, torch
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'triton' and sys.argv[1] == 'absent':
            raise ModuleNotFoundError('triton is blocked')
sys.meta_path.insert(0, Block())
already = 'triton' in sys.modules
import leannorm
from leannorm.ops.select import backends
x = torch.randn(4, 8)
leannorm.nn.LayerNorm(8)(x).sum().backward()
leannorm.nn.BatchNorm1d(8)(x)
print('triton' in sys.modules and not already, *backends(x)['triton'])
"""
    for state, word in (("absent", "Triton is not installed"), ("present", "")):
        command = [sys.executable, "-c", code, state]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("False "), done.stdout
        assert word in done.stdout
