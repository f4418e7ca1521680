"""Builds the C++ kernels into `leannorm/_C.so`; the package installs without them and says why.

The library uses no Python and only torch's stable ABI (2.10 on), so one build works with every Python and
every later torch, and the wheel is tagged for the platform alone. `csrc/*_kernels.cpp` is compiled once for
each instruction set of `INSTRUCTION_SETS`, and the best one is chosen when the library is loaded.

`csrc/nodes/` is built into a second library, `leannorm/_nodes.so`: autograd nodes that make small calls fast.
They need all of torch's C++ interface and work only with the torch and the Python that they are built for, so
a wheel has none.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

X86 = platform.machine().lower() in ("x86_64", "amd64")
INSTRUCTION_SETS = {
    "base": ["-O1"] if X86 else [],  # only for machines from before 2013
    **({"v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"]} if X86 else {}),
}
FLAGS = [
    "-std=c++17",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",  # vectors wider than the machine's are never passed to a call that is not inlined
    "-w",  # the compiler warns about its own intrinsics
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
]
# sources that make calls, and have plain loops that the compiler vectorizes
DRIVERS_LEVEL = ["-O2", "-ftree-vectorize"]
# Kernels write out their vectors: as fast as with -O3, and a sixth less time to compile. Vectors that the
# compiler makes from scalars (SLP) would wait for memory.
KERNELS_LEVEL = ["-O2", "-fpeel-loops", "-fno-tree-slp-vectorize"]
NODES = "csrc/nodes/nodes.cpp"
NODE_FLAGS = ["-std=c++20", "-O1", "-finline-small-functions", "-g0", "-fPIC", "-fvisibility=hidden", "-w"]


here = Path(__file__).parent


class Torch(NamedTuple):
    """The torch to build for: its folder, its release, and the commit of that release."""

    root: Path
    release: str
    commit: str

    @classmethod
    def find(cls) -> Torch:
        """The Python to build for: that of the environment installed into, even if pip isolates the build.

        pip isolates a build through PYTHONPATH alone, so the same Python run without it sees that
        environment.
        """
        tell = "import torch; print(torch.__file__, torch.__version__, torch.version.git_version, sep='\\n')"
        for options in ((), ("-E",)):
            command = [sys.executable, *options, "-c", tell]
            told = subprocess.run(command, cwd=sys.prefix, capture_output=True, text=True)
            if told.returncode == 0:
                file, release, commit = told.stdout.splitlines()[-3:]
                if tuple(int(part) for part in release.split("+")[0].split(".")[:2]) < (2, 10):
                    raise BuildError(f"building needs torch >= 2.10 for its stable ABI, found {release}")
                return cls(Path(file).parent, release, commit)
        raise BuildError("no torch was found while building; install torch, then with --no-build-isolation")


def assigned_in(source: str) -> dict[str, ast.expr]:
    """The right-hand sides of a module's assignments; leannorm itself may not be importable yet."""
    body = ast.parse((here / source).read_text()).body
    return {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}


class BuildError(Exception):
    """Why the kernels cannot be built here."""


class BuildKernels(build_ext):
    """Compiles every source (kernels once per instruction set) and links them; an install never fails
    here."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        library = Path(self.build_lib, "leannorm", "_C.so")
        nodes = library.with_name("_nodes.so")
        reason = library.with_suffix(".reason")
        made = library, reason, nodes, nodes.with_suffix(".reason")
        for stale in made:
            stale.unlink(missing_ok=True)
        in_place, self.inplace = self.inplace, False
        try:
            if os.environ.get("LEANNORM_BUILD_CPP", "1") == "0":
                raise BuildError("the package was built without them (LEANNORM_BUILD_CPP=0)")
            if sys.platform == "win32":
                raise BuildError("the kernels are not built on Windows")
            super().run()
        except Exception as error:  # whatever the compiler fails on: the reference backend is used instead
            message = " ".join(str(error).split())
            print(f"leannorm: installing without the C++ kernels: {message}", file=sys.stderr)
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(message + "\n")
        finally:
            self.inplace = in_place
        if in_place:
            self._copy_to_source(*made)

    def _copy_to_source(self, *built: Path) -> None:
        package = Path(self.get_finalized_command("build_py").get_package_dir("leannorm"))
        for file in built:
            target = package / file.name
            # remove it first: a process that has loaded the library keeps the old file
            target.unlink(missing_ok=True)
            if file.exists():
                target.write_bytes(file.read_bytes())

    def build_extension(self, ext: Extension) -> None:
        torch = Torch.find()
        flags = [*FLAGS, f"-I{torch.root / 'include'}", f'-DLEANNORM_SCHEMAS="{self._schema_digest()}"']
        jobs = [
            (source, instructions)
            for source in ext.sources
            for instructions in (INSTRUCTION_SETS if source.endswith("_kernels.cpp") else ("",))
        ]

        def compiled(job: tuple[str, str]) -> str:
            source, instructions = job
            extra = DRIVERS_LEVEL
            if instructions:
                extra = [*KERNELS_LEVEL, f"-DLEANNORM_ISA={instructions}", *INSTRUCTION_SETS[instructions]]
            own = shlex.split(os.environ.get("CXXFLAGS", ""))  # last, so that they override the defaults
            return self.compiler.compile(
                [source],
                output_dir=os.path.join(self.build_temp, instructions or "common"),
                extra_postargs=[*flags, *extra, *own],
                depends=ext.depends,
            )[0]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            nodes = pool.submit(self._build_nodes, torch, Path(self.get_ext_fullpath(ext.name)))
            objects = list(pool.map(compiled, jobs))
        nodes.result()
        apple = sys.platform == "darwin"
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            library_dirs=[str(torch.root / "lib")],
            libraries=["torch_cpu"],
            extra_postargs=["-undefined", "dynamic_lookup"] if apple else ["-Wl,--as-needed"],
            target_lang="c++",
        )

    def _build_nodes(self, torch: Torch, library: Path) -> None:
        """The autograd nodes, or a note that says why there are none."""
        target = library.with_name("_nodes.so")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if os.environ.get("LEANNORM_BUILD_NODES", "1") == "0":
                raise BuildError(
                    "the package was built without them, as every wheel is (LEANNORM_BUILD_NODES=0)"
                )
            objects = self.compiler.compile(
                [NODES],
                output_dir=os.path.join(self.build_temp, "nodes"),
                include_dirs=[
                    str(torch.root / "include"),
                    str(torch.root / "include/torch/csrc/api/include"),
                    sysconfig.get_path("include"),
                ],
                extra_postargs=[
                    *NODE_FLAGS,
                    f'-DLEANNORM_NODES="{self._built_for(torch)}"',
                    *shlex.split(os.environ.get("CXXFLAGS", "")),
                ],
            )
            self.compiler.link_shared_object(
                objects,
                str(target),
                library_dirs=[str(torch.root / "lib")],
                libraries=["torch_cpu", "torch_python", "c10"],
                extra_postargs=["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [],
                target_lang="c++",
            )
        except Exception as error:  # the kernels do not need the nodes
            target.unlink(missing_ok=True)
            target.with_suffix(".reason").write_text(" ".join(str(error).split()) + "\n")

    def _built_for(self, torch: Torch) -> str:
        """The same text as autograd/nodes.py expects."""
        interface = ast.literal_eval(assigned_in("src/leannorm/autograd/nodes.py")["INTERFACE"])
        releases = torch.release, torch.commit, sysconfig.get_config_var("SOABI")
        return f"{interface} torch {' '.join(releases)} {self._schema_digest()}"

    @staticmethod
    def _schema_digest() -> str:
        """The hash of all operators' schemas, computed as in ops/backends/library.py."""
        assigned = assigned_in("src/leannorm/ops/schema.py")
        schemas = [schema for name in ("_SCHEMAS", "_BETWEEN") for schema in ast.literal_eval(assigned[name])]
        return hashlib.sha256("\n".join(schemas).encode()).hexdigest()[:16]


class PlatformWheel(bdist_wheel):
    """One wheel for every Python: it depends on the platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        return "py3", "none", system


sources = sorted(str(path.relative_to(here)) for path in (here / "csrc").glob("*.cpp"))
headers = sorted(str(path.relative_to(here)) for path in (here / "csrc").glob("**/*.h"))
setup(
    ext_modules=[Extension("leannorm._C", sources, depends=[*headers, *sources, NODES], language="c++")],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
