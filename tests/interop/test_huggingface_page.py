"""The script of docs/huggingface.md, which runs with all examples, has three lines of leannorm."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def test_three_lines_more_than_without():
    script = PAGE.read_text().split("<!-- script -->\n```python\n")[1].split("```")[0]
    ours = [line for line in script.splitlines() if "leannorm" in line.split("#")[0]]
    assert [line[-3:] for line in ours] == ["# 1", "# 2", "# 3"]
