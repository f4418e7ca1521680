"""What `pip install` of the wheel gives, in a folder of its own, and processes that have that and no more."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

JOBS = Path(__file__).parent
ROOT = JOBS.parents[1]
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "csrc", "src")
NOT_BUILT_FROM = shutil.ignore_patterns("*.so", "*.reason", "__pycache__", "*.egg-info")

# timm and transformers import torchvision, and fail with one for another torch; a user installs the right one
FIT_TORCHVISION = """
import runpy, sys
from leannorm.report.fitting import import_torchvision
import_torchvision()
sys.argv = sys.argv[1:]
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The folder that the wheel is installed into, built without a compiler, as for macOS and Windows."""
    if not any(distributions(name="pip")):
        pytest.skip("needs pip")
    tree, wheels, folder = (tmp_path_factory.mktemp(name) for name in ("tree", "wheels", "installed"))
    for name in BUILT_FROM:  # a copy, since files of earlier builds would come along
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=NOT_BUILT_FROM)
        else:
            shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, tree]
    subprocess.run(build, env={**os.environ, "LEANNORM_BUILD_CPP": "0"}, check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", folder, wheel], check=True)
    empty = Desk(tmp_path_factory.mktemp("empty"), folder)
    imported = empty.run(sys.executable, "-c", "import leannorm; print(leannorm.__file__)")
    assert Path(imported.strip()) == folder / "leannorm" / "__init__.py"
    return folder


class Desk:
    """An empty folder in which a user works."""

    def __init__(self, folder, installed):
        self.folder = folder
        own = {name: value for name, value in os.environ.items() if not name.startswith("LEANNORM_")}
        programs = [str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        self.environment = own | {
            "PYTHONPATH": str(installed),
            "PATH": os.pathsep.join(programs),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def put(self, *names):
        """Files that the user has written."""
        for name in names:
            shutil.copy(JOBS / name, self.folder)

    def run(self, *command, status=0):
        """What a command prints."""
        program = shutil.which(command[0], path=self.environment["PATH"])
        ran = subprocess.run(
            [program, *command[1:]],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert ran.returncode == status, ran.stdout + ran.stderr
        return ran.stdout

    def python(self, script):
        """What a script prints."""
        return self.run(sys.executable, "-c", FIT_TORCHVISION, script)


@pytest.fixture
def desk(tmp_path, installed):
    return Desk(tmp_path, installed)
