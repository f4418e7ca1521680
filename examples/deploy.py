"""Export a model that was trained under `lean()` to `.pt2` and ONNX, which run without leannorm.

    python examples/deploy.py

Needs scikit-learn, onnx, onnxscript and onnxruntime:
`pip install 'leannorm[demo,interop]' onnxscript onnxruntime`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import onnxruntime
import torch
import torch.nn.functional as F
from digits import data, network, train
from measure import held

import leannorm

WITHOUT_LEANNORM = """
import sys
sys.modules["leannorm"] = None  # any import of it fails
import torch
images = torch.load(sys.argv[2])
torch.save(torch.export.load(sys.argv[1]).module()(images), sys.argv[3])
"""


def main():
    (images, labels), (test_images, _) = data()
    torch.manual_seed(0)
    model = train(leannorm.convert(network()), images, labels, leannorm.lean(), epochs=1)
    held(model, lambda: F.cross_entropy(model(images[:250]), labels[:250]))

    batch = test_images[:8]
    with torch.no_grad():
        expected = model.eval()(batch)
    report = leannorm.fold(model, (batch,))  # the norms become part of the convolutions
    print(f"folded {len(report.folded)} batch norms of {len(report.folded) + len(report.skipped)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, leaving in (("converted", model), ("folded", report.model)):
            exported = torch.export.export(leaving, (batch,))
            torch.export.save(exported, folder / "net.pt2")
            torch.save(batch, folder / "images.pt")
            arguments = [str(folder / file) for file in ("net.pt2", "images.pt", "answers.pt")]
            subprocess.run([sys.executable, "-c", WITHOUT_LEANNORM, *arguments], check=True)
            told(f".pt2, {title}, in a process without leannorm", torch.load(folder / "answers.pt"), expected)

            torch.onnx.export(leaving, (batch,), folder / "net.onnx", dynamo=True, verbose=False)
            session = onnxruntime.InferenceSession(folder / "net.onnx")
            (answers,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
            told(f"ONNX, {title}, by onnxruntime", torch.from_numpy(answers), expected)


def told(title, answers, expected):
    difference = ((answers - expected).abs().max() / expected.abs().max()).item()
    verdict = "the same to 1e-5" if difference < 1e-5 else "different"
    print(f"{title}: {verdict} (largest difference {difference:.1e} of the largest output)")


if __name__ == "__main__":
    main()
