"""docs/huggingface.md: its script, which runs with all examples, has three lines of leannorm."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.architectures import import_torchvision

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def test_three_lines_more_than_without():
    script = PAGE.read_text().split("<!-- script -->\n```python\n")[1].split("```")[0]
    ours = [line for line in script.splitlines() if "leannorm" in line.split("#")[0]]
    assert [line[-3:] for line in ours] == ["# 1", "# 2", "# 3"]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_training_arguments_have_no_place_for_a_callback():
    """As the page says: `report_to` names trackers of transformers alone."""
    import_torchvision()
    from transformers import TrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks

    with pytest.raises(ValueError, match="leannorm is not supported, only"):
        get_reporting_integration_callbacks(["leannorm"])
    named = {name for name in TrainingArguments.__dataclass_fields__ if "callback" in name}
    assert named <= {"restore_callback_states_from_checkpoint"}  # a flag
