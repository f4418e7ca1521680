"""What checks a change: the hooks are `make check`, and the workflows name what the tree has."""

import re
from pathlib import Path

import pytest
import yaml

from leannorm._torch import TESTED

ROOT = Path(__file__).parent.parent
MAKEFILE = ROOT / "Makefile"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a copy without hidden files")


def recipe(target):
    """The lines of one of the Makefile's recipes."""
    found = re.search(rf"(?m)^{target}:.*\n((?:\t.*\n)+)", MAKEFILE.read_text())
    return [line.strip() for line in found[1].splitlines()]


def test_the_hooks_are_what_make_check_runs():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == [
        line.replace("$(BIN)", ".venv/bin") for line in recipe("check")
    ]


def jobs(workflow):
    return yaml.safe_load(workflow.read_text())["jobs"].values()


def said(workflow):
    """All that its steps run."""
    return "\n".join(step["run"] for job in jobs(workflow) for step in job.get("steps", ()) if "run" in step)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_what_the_tree_has(workflow):
    commands = said(workflow)
    targets = set(re.findall(r"\bmake ([a-z]+)", commands))
    assert targets <= set(re.findall(r"(?m)^([a-z]+):", MAKEFILE.read_text()))
    paths = set(re.findall(r"(?<![\w/.-])((?:tests|site|\.ci)/[\w./]+)", commands))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    extras = {name for named in re.findall(r"\[([a-z,]+)\]", commands) for name in named.split(",")}
    known = re.search(r"(?ms)^\[project.optional-dependencies\]$(.*?)^\[project.scripts", project())[1]
    assert extras <= set(re.findall(r"(?m)^(\w+) = \[", known))
    called = [job["uses"] for job in jobs(workflow) if job.get("uses", "").startswith("./")]
    assert all((ROOT / path).is_file() for path in called)


def project():
    return (ROOT / "pyproject.toml").read_text()


def test_the_first_and_the_last_torch_and_every_python_have_a_job():
    test = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    assert test["torches"]["strategy"]["matrix"]["torch"] == [TESTED[0], TESTED[-1]]
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project())
    assert test["pythons"]["strategy"]["matrix"]["python"] == pythons
