"""Every script in `examples/` runs as a user runs it, in a process of its own, and prints what it says."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from leannorm.autograd.nodes import NODES

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

MAKE = """
import json, sys
sys.path[0] = sys.argv[1]
from make_notebook import notebook_of, run
print(json.dumps(run(notebook_of(sys.argv[2]))))
"""
SAME = "weights after training, plain PyTorch and lean: equal bit for bit"
HELD = re.compile(r"kept after forward: plain PyTorch ([\d.]+) MB, lean ([\d.]+) MB, ratio (\d\.\d\d)")

# (script, libraries that it needs, sentences that it prints, the largest ratio that it may print)
SCRIPTS = [
    ("digits", ["sklearn"], [SAME], 0.5),
    ("timm_loop", ["sklearn", "timm"], [SAME], 0.5),
    ("transformers_trainer", ["transformers", "accelerate"], [SAME], 0.5),
    ("mixture_of_experts", ["transformers"], [SAME], 0.53),
    ("lightning_digits", ["sklearn", "lightning"], [SAME], 0.5),
    ("unet_denoising", ["sklearn"], [SAME], 0.5),
    ("segment_a_volume", [], [SAME], 0.53),
    (
        "deploy",
        ["sklearn", "onnxruntime", "onnxscript"],
        [
            "folded 4 batch norms of 4",
            ".pt2, converted, in a process without leannorm: the same to 1e-5",
            "ONNX, converted, by onnxruntime: the same to 1e-5",
            ".pt2, folded, in a process without leannorm: the same to 1e-5",
            "ONNX, folded, by onnxruntime: the same to 1e-5",
        ],
        0.6,
    ),
]


@pytest.fixture
def no_pass_is_small():
    """Instead of the fixture for all other tests: examples run as users run them, small passes included."""


NOTEBOOKS = ("memory_over_a_step", "which_setting", "misbehaving_norm")
OTHERS = ("two_ranks", "padded_speech", "never_out", *NOTEBOOKS)


def output_of(*command, folder):
    """What a process prints that has the environment of this one, and nothing of its tests."""
    ran = subprocess.run(
        command,
        cwd=folder,  # files that it leaves behind show
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    assert not list(folder.iterdir())
    return ran.stdout


def check_held(printed, most):
    """The printed ratio is that of the printed bytes, and at most `most`."""
    found = HELD.findall(printed)
    assert found, printed
    for stock, lean, ratio in found:
        assert float(lean) / float(stock) == pytest.approx(float(ratio), abs=0.01)
        assert float(stock) > 20  # large enough to matter
        assert float(ratio) <= most, printed


def needs(libraries):
    return [name for name in libraries if find_spec(name) is None]


def test_every_script_is_run_here():
    shown = {*(name for name, *_ in SCRIPTS), *OTHERS, "make_notebook", "measure", "with_torchvision"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == shown
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)


def test_every_script_stands_on_the_page_of_examples():
    listed = set(re.findall(r"(?m)^\| `(\w+)\.\w+`", (ROOT / "docs" / "examples.md").read_text()))
    assert listed == {*(name for name, *_ in SCRIPTS), *OTHERS}


@pytest.mark.parametrize(("name", "libraries", "sentences", "most"), SCRIPTS, ids=[s[0] for s in SCRIPTS])
def test_an_example(name, libraries, sentences, most, tmp_path):
    if needs(libraries):
        pytest.skip(f"needs {', '.join(needs(libraries))}")
    printed = output_of(sys.executable, str(EXAMPLES / f"{name}.py"), folder=tmp_path)
    for sentence in sentences:
        assert sentence in printed, printed
    check_held(printed, most)


def test_two_ranks(tmp_path):
    if needs(["sklearn"]):
        pytest.skip("needs sklearn")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = output_of(*torchrun, str(EXAMPLES / "two_ranks.py"), folder=tmp_path)
    assert "2 ranks and one process: the same losses" in printed, printed
    check_held(printed, 0.5)


def test_padding_does_not_shift_a_conformer(tmp_path):
    printed = output_of(sys.executable, str(EXAMPLES / "padded_speech.py"), folder=tmp_path)
    assert "ours: the same outputs and statistics, however far the batch is padded" in printed, printed
    rows = [re.split(r" {2,}", line) for line in printed.splitlines() if " norm, " in line]
    last = {name: float(shifts[-1]) for name, *shifts in rows}
    assert last["batch norm, torch"] > 1 > 1e-4 > last["batch norm, ours"]
    assert last["group norm, torch"] > 1 > 1e-4 > last["group norm, ours"]


@pytest.mark.skipif(
    NODES is None or not Path("/proc/self/status").exists(), reason="needs Linux and the C++ nodes"
)
def test_a_run_that_never_runs_out_of_memory(tmp_path):
    printed = output_of(sys.executable, str(EXAMPLES / "never_out.py"), folder=tmp_path)
    assert re.search(r"plain PyTorch: out of memory in step 5, a batch of \(4, 1000\)", printed), printed
    assert 'lean(limit="device"): all 12 steps' in printed, printed
    again, steps = re.search(r"compute something again: (\d+) of (\d+)", printed).groups()
    assert 2 <= int(again) < int(steps) == 12, printed  # the two long ones at least, and not all
    assert "the losses of the first 5 steps are the same" in printed, printed


def source_of(cells):
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def texts_of(name, folder):
    """What a notebook prints, executed now and as it is committed. It is made from its script."""
    if needs(["nbclient", "ipykernel", "matplotlib", "sklearn"]):
        pytest.skip("needs nbclient, ipykernel, matplotlib and sklearn")
    file = EXAMPLES / f"{name}.ipynb"
    assert file.stat().st_size < 100_000
    committed = json.loads(file.read_text())
    made = json.loads(output_of(sys.executable, "-c", MAKE, str(EXAMPLES), name, folder=folder))
    assert source_of(made["cells"]) == source_of(committed["cells"]), "run python examples/make_notebook.py"
    for notebook in (made, committed):
        outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
        assert not [output for output in outputs if output.get("name") == "stderr"]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
        yield "".join("".join(output.get("text", "")) for output in outputs)


def test_the_notebook_of_memory(tmp_path):
    for text in texts_of("memory_over_a_step", tmp_path):
        ratios = [float(ratio) for ratio in re.findall(r"\((\d\.\d\d) of the baseline's\)", text)]
        assert len(ratios) == 3, text
        assert ratios[0] == 1.0 > 0.7 > ratios[1] > ratios[2]
        assert text.count("equal bit for bit") == 3


def test_the_notebook_of_settings(tmp_path):
    for text in texts_of("which_setting", tmp_path):
        rows = re.findall(r"(?m)^(\S.*?) +(\d\.\d\d)  \d\.\d\d  \d\.\d\d  equal bit for bit$", text)
        kept = {name: float(ratio) for name, ratio in rows}
        assert len(kept) == 6, text
        assert kept["plain PyTorch"] == 1.0
        assert kept['lean("conv")'] < kept["lean()"] <= 0.5
        assert kept["lean(budget=0.4)"] <= 0.4


def test_the_notebook_of_a_norm(tmp_path):
    script = " ".join((EXAMPLES / "misbehaving_norm.py").read_text().split())
    for text in texts_of("misbehaving_norm", tmp_path):
        training, before, after = (float(found) for found in re.findall(r"accuracy in .*?: +(0\.\d+)", text))
        assert training > 0.9
        assert before < training - 0.08 < after
        remedy = re.search(r"remedy: (for name in .*\n *leannorm\.recalibrate.*)", text)[1]
        assert " ".join(remedy.split()) in script  # it is pasted as printed
        assert "findings: 0" in text
