"""Lightning on two processes: `sync_batchnorm=True` equals one process on the whole batch, then is undone."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leannorm import MissingDependencyError
from leannorm.interop.lightning import layer_sync

LIGHTNING = importlib.util.find_spec("lightning") is not None


def test_without_lightning(monkeypatch):
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
        for inner in [m for m in sys.modules if m.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, inner)
    with pytest.raises(MissingDependencyError, match="pip install lightning"):
        layer_sync()


@pytest.mark.skipif(not LIGHTNING, reason="needs Lightning")
@pytest.mark.conformance
def test_two_processes(tmp_path):
    script = Path(__file__).parent / "lightning_run.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "0.json").read_text())
    assert found == json.loads((tmp_path / "1.json").read_text())
    torch.manual_seed(0)
    x, t = torch.randn(8, 3, 6, 6).double(), torch.randn(8, 4).double()
    torch.manual_seed(0)
    import lightning_network

    model = lightning_network.network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - t).square().mean().backward()
        optimizer.step()
    assert found["shared"] == "SyncBatchNorm2d"
    assert found["after"] == "torch.nn.modules.batchnorm.BatchNorm2d"
    assert abs(found["var"] - model[1].running_var.sum().item()) < 1e-12
    assert abs(found["weight"] - model[0].weight.sum().item()) < 1e-12
