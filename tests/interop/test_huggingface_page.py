"""The script of docs/huggingface.md runs as it stands there, and three of its lines are leannorm's."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.architectures import import_torchvision

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def script():
    return PAGE.read_text().split("<!-- script -->\n```python\n")[1].split("```")[0]


def test_three_lines_more_than_without():
    assert sum("leannorm" in line.split("#")[0] for line in script().splitlines()) == 3


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.filterwarnings("ignore")
def test_the_script_trains_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    import_torchvision()
    names = {"__name__": "__main__"}
    exec(compile(script(), str(PAGE), "exec"), names)
    model = names["model"]
    assert all(type(layer).__module__.startswith("leannorm.") for layer in (model.model.norm,))
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()
    assert names["trainer"].state.global_step == 4
