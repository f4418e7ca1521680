"""The benchmark's plots of held bytes against time, drawn from its JSON."""

import xml.etree.ElementTree as ET

from benchmarks.lean_lines import chart, series


def row(setting, ratio, kept, dtype="float32", model="llama"):
    return {"model": model, "dtype": dtype, "setting": setting, "ratio": ratio, "kept_ratio": kept}


ROWS = [
    row("stock", 1.0, 1.0),
    row("lean(budget=.25)", 1.1, 0.25),
    row("lean()", 1.02, 0.5),
    row("checkpoint, every block", 1.3, 0.2),
    row('lean("conv")', 1.2, 0.2, "bfloat16"),
    row("lean()", 1.0, 0.6, model="dit"),
]


def test_a_line_goes_from_stock_to_the_fewest_bytes():
    lines = series(ROWS[:4])
    assert [held for _, held, _ in lines["lean"]] == [1.0, 0.5, 0.25]
    assert [setting for *_, setting in lines["checkpoint"]] == ["stock", "checkpoint, every block"]
    assert "torch.compile" not in lines


def test_one_plot_for_each_dtype_of_a_model():
    drawing = ET.fromstring(chart(ROWS, "llama"))
    name = "{http://www.w3.org/2000/svg}"
    assert len(drawing.findall(f"{name}polyline")) == 3
    assert [t.text for t in drawing.iter(f"{name}title")].count('lean("conv")') == 1
    assert {"float32", "bfloat16"} <= {t.text for t in drawing.findall(f"{name}text")}
