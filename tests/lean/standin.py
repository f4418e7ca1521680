"""The stand-in for a GPU (standin.cpp): built once with the machine's compiler, registered as "standin"."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")


def why_not():
    """Why there is none here, or None."""
    if not sys.platform.startswith("linux"):
        return "its memory has two addresses, by Linux's memfd"
    return None if shutil.which(os.environ.get("CXX", "g++")) else "there is no compiler"


def built():
    """The library, by its source and torch's release; made where it is not there."""
    release = f"{torch.__version__} {torch.version.git_version} {sysconfig.get_config_var('SOABI')}"
    name = hashlib.sha256(SOURCE.read_bytes() + release.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"leannorm-standin-{os.getuid()}" / f"standin_{name}.so"
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    own = path.with_name(f"{path.name}.{os.getpid()}")
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = [
        *(os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-g0", "-w", "-fPIC", "-shared"),
        *("-DTORCH_EXTENSION_NAME=standin_device", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", str(SOURCE)),
        *(f"-I{one}" for one in include),
        *("-o", str(own), f"-L{root / 'lib'}", "-ltorch_cpu", "-ltorch_python", "-ltorch", "-lc10"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    own.replace(path)
    return path


def register():
    """The library; tensors may be on "standin" from now on, in this process."""
    loader = ExtensionFileLoader("standin_device", str(built()))
    spec = spec_from_file_location("standin_device", loader.path, loader=loader)
    library = module_from_spec(spec)
    loader.exec_module(library)
    torch.utils.rename_privateuse1_backend("standin")
    module = types.ModuleType("torch.standin")
    module.is_available, module.device_count, module.current_device = (lambda: True), (lambda: 1), (lambda: 0)
    module.is_initialized, module._is_in_bad_fork = (lambda: True), (lambda: False)
    module.manual_seed_all = lambda seed: None
    module.Stream, module.stream = torch.Stream, lambda stream: stream
    module.current_stream = torch.accelerator.current_stream
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("standin", module)
    return library


class Graph:
    """A captured graph, when its capture has ended."""

    captured = None

    def replay(self):
        self.captured.replay()


@contextmanager
def capture(library, graph, pool=1):
    """What is called within becomes the graph's calls; its memory is the pool's, as in `torch.cuda.graph`."""
    library.begin_capture(pool)
    try:
        yield graph
    finally:
        graph.captured = library.end_capture()


def print_found(cases, chosen):
    """Run the cases, (function, *arguments) by name, print what they return as JSON, or their error, and end.

    `chosen(name)`: whether a case runs.
    """
    found = {}
    for case, (run, *arguments) in cases.items():
        if not chosen(case):
            continue
        try:
            found[case] = run(*arguments)
        except Exception as error:
            found[case] = {"error": f"{type(error).__name__}: {error}"}
    print_and_end(found)


def print_and_end(found):
    """Print it as JSON, and end the process at once.

    Autograd's thread of the device may still free what the last backward pass left. Python ends threads that
    want its lock while it shuts down, and C++ takes that for a crash.
    """
    print(json.dumps(found), flush=True)
    os._exit(0)


def found_by(script, *options):
    """What a script of this folder prints as JSON, in its own process: a device that is registered stays."""
    path = os.pathsep.join([str(SOURCE.parent), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, str(SOURCE.with_name(script)), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "LEANNORM_RATES": ""},
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.strip().splitlines()[-1])
