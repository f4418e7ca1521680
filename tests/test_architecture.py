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
    {"_errors", "_torch", "_types", "_version"},
    {"_batch", "_files", "_freed_memory", "_report", "planning"},
    {"ops"},
    {"_checks", "_untouched", "distributed"},
    {"autograd"},
    {"functional"},
    {"nn"},
    {"_catalog"},
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
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE or p.stem != "__init__")


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def root_names():
    """The room behind each name that the package root offers."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path = f"{node.module}.{alias.name}".split(".")
                assert path[0] == "leannorm"
                yield alias.asname or alias.name, path[1]
        elif isinstance(node, ast.Assign):
            yield from ((target.id, "_errors") for target in node.targets)  # no room stands behind it


ROOT_NAMES = dict(root_names())


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
        "reference_modulated",
        "reference",
        "backend",
        "compiled",
        "compiled_modulated",
        "shown",
    ]
    of = {name: before[:i] for i, name in enumerate(before)} | {"library": []}
    of |= {"aten": before, "cpu": [*before, "library"], "triton": [*before, "triton"]}
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


BESIDE = "shown.py", "aten.py", "as_given.py"


def test_an_operator_is_named_in_few_files_of_the_kernels():
    """A new one needs six: the reference, the schema, the call, C++, and Triton's operator and kernel.

    Beside them `shown.py` may write it out for compilers, `aten.py` for torch's kernels, and the fast path
    may hand it over.
    """
    files = [*(SOURCE / "ops").rglob("*.py"), *(ROOT / "csrc").glob("*.cpp")]
    texts = {path: path.read_text() for path in files if path.name not in BESIDE}
    for operator in (*schema.OPERATORS, *schema.MODULATED, *schema.BETWEEN):
        assert sum(bool(re.search(rf"\b{operator}\b", text)) for text in texts.values()) <= 6, operator


def test_no_file_is_long():
    tracked = [*SOURCE.rglob("*.py"), *(ROOT / "csrc").rglob("*.*"), *(ROOT / "tests").rglob("*.py")]
    tracked += (ROOT / "benchmarks").rglob("*.py")
    long = {str(p.relative_to(ROOT)): n for p in tracked if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def modules():
    return [leannorm, *(importlib.import_module(f"leannorm.{name}") for name in ("functional", "nn"))]


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.__name__)
def test_exports_are_complete_sorted_and_documented(module):
    public = {k for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, type(sys))}
    rooms = {m.name for m in pkgutil.iter_modules(module.__path__)}
    assert set(module.__all__) - rooms == public - rooms - {"annotations"}
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
