"""The command line: exit statuses, one line for bad usage, no traceback, no half-written file."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout

import pytest
import torch

import leannorm
from leannorm._errors import InputError
from leannorm._files import check_writable, write_text
from leannorm.cli import main
from leannorm.report.bench import CASES, bench

SMALL = [CASES[0]._replace(name="small", shape=(2, 64, 4, 4))]
RUN = [sys.executable, "-c", "import sys; from leannorm_command import main; sys.exit(main())"]


def in_a_process(*arguments, **kwargs):
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=280, **kwargs)


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["demo", "--help"], ["check", "--help"], ["info", "--help"]]
)
def test_help_exits_well(arguments, capsys):
    assert main(arguments) == 0
    assert "Usage: leannorm" in capsys.readouterr().out


def test_the_version_is_there_without_torch_and_typer():
    told = """
        import sys
        from leannorm_command import main
        print(main(), [name for name in ("torch", "typer", "numpy") if name in sys.modules])
    """
    command = [sys.executable, "-c", told.replace("\n        ", "\n"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"leannorm {leannorm.__version__}\n0 []\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="no module resource")
@pytest.mark.parametrize(
    "arguments", [["--help"], ["profile", "--help"], ["profil"], ["fit", "--memry", "8"]]
)
def test_help_and_bad_usage_come_before_torch(arguments):
    """In under 0.4 s of processor time; on a busy machine in a quarter of what torch's import takes there."""
    told = """
        import sys
        from leannorm_command import main
        status = main()
        print("torch" in sys.modules, status)
    """
    done, seconds = _timed(told.replace("\n        ", "\n"), *arguments)
    assert done.stderr.count("\n") == (0 if "--help" in arguments else 1)
    assert done.stdout.split()[-2:] == ["False", "0" if "--help" in arguments else "2"]
    assert seconds < 0.4 or seconds < _timed("import torch")[1] / 4


def _timed(program, *arguments):
    """What came of a program, and its seconds of processor time."""
    used = "; import resource as r; u = r.getrusage(r.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"
    command = [sys.executable, "-c", f"{program.rstrip()}\n{used[2:]}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    *lines, seconds = done.stdout.splitlines()
    done.stdout = "\n".join(lines)
    return done, float(seconds)


def test_the_commands_are_told_in_whole_sentences(capsys):
    assert main(["--help"]) == 0
    listed = " ".join(capsys.readouterr().out.partition("Commands:")[2].split())
    assert "..." not in listed
    for name in ("profile", "fit", "doctor", "fold"):
        assert f"{name} " in listed
    assert (
        "Find the largest batch that fits in a memory, in plain PyTorch and under each lean setting."
        in listed
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_what_the_system_refuses_is_one_line(capsys):
    arguments = [
        "fit",
        "test_inputs:Language",
        "--input",
        "8:int64<50",
        "--memory",
        "1MiB",
        "--json",
        "/dev/full",
    ]
    assert main(arguments) == 2
    assert capsys.readouterr().err == "leannorm: /dev/full: No space left on device\n"


def test_a_file_that_cannot_be_made_is_refused_before_the_work(tmp_path):
    long = tmp_path / ("n" * 300)  # permissions say yes
    with pytest.raises(InputError, match=r"cannot be written to \(File name too long\)"):
        check_writable(long)
    check_writable(tmp_path / "out.json")
    assert not list(tmp_path.iterdir())


BAD_USAGE = {
    "a program as text": (["fork", "timm:resnet18", "-o", "prog.txt"], "in one format, .pt2; got 'prog.txt'"),
    "a folded model as text": (["fold", "timm:resnet18", "-o", "model.onnx"], "name it *.pt2"),
    "a memory without its unit": (["fit", "timm:resnet18", "--memory", "8"], "got '8' without its unit"),
    "a page where none can be": (
        ["profile", "timm:resnet18", "--input", "2x3x64x64", "--report", "/proc/out.html"],
        "'/proc/out.html' cannot be written to",
    ),
    "a name that is nearly a model's": (
        ["profile", "timm:resnet5O", "--input", "2x3x64x64"],
        "did you mean resnet50",
    ),
    "unknown command": (["bogus"], "No such command 'bogus'"),
    "unknown option": (["demo", "--bogus"], "No such option"),
    "not a number": (["demo", "--epochs", "many"], "--epochs"),
    "too few epochs": (["demo", "--epochs", "0"], "--epochs must be at least 1; got 0"),
    "too small batches": (["demo", "--batch-size", "1"], "--batch-size must be at least 2; got 1"),
    "too large batches": (["demo", "--batch-size", "2000"], "--batch-size must be at most 1437"),
    "no such seed": (["demo", "--seed", "-1"], "--seed must be at least 0"),
    "no such folder": (["demo", "--json", "/nowhere/at/all.json"], "there is no folder"),
    "no such folder, check": (["check", "--json", "/nowhere/at/all.json"], "there is no folder"),
    "unknown device, profile": (
        ["profile", "torch.nn:Identity", "--input", "2x3", "--device", "warp"],
        "cannot use device 'warp'",
    ),
    "unknown device, bench": (["bench", "--device", "warp"], "cannot use device 'warp'"),
    "unknown dtype, bench": (["bench", "--dtype", "int8"], "--dtype is one of float32"),
    "a sample without its batch": (
        ["profile", "timm:resnet18", "--input", "3x64x64"],
        "timm:resnet18 does not take --input 3x64x64: ",
    ),
    "another number of channels": (
        ["check", "--model", "timm:resnet18", "--input", "2x5x64x64"],
        "to have 3 channels, but got 5",
    ),
    "one value per channel": (
        ["profile", "timm:resnet18", "--input", "1x3x32x32"],
        "Expected more than 1 value per channel",
    ),
    "a class that wants arguments": (
        ["profile", "torch.nn:Linear", "--input", "2x3"],
        "'torch.nn:Linear' was called without arguments and raised TypeError: ",
    ),
    "no such program": (["fold", "nofile.pt2"], "there is no file 'nofile.pt2'"),
    "not a model, fold": (["fold", "resnet18"], "there is no file 'resnet18'; a model is named timm:NAME"),
    "an unknown method, before the model is made": (
        ["profile", "no.such:model", "--input", "2x3", "--against", "foo"],
        "against is one of checkpoint, compile; got 'foo'",
    ),
    "a hint names the command": (["profile", "--bogus"], "(see leannorm profile --help)"),
    "unknown device": (["demo", "--device", "warp"], "cannot use device 'warp'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_USAGE.values(), ids=BAD_USAGE)
def test_bad_usage_is_one_line_on_stderr_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("leannorm: ")
    assert "Traceback" not in out + err


@pytest.mark.parametrize("command", ["check", "doctor", "fit", "fold", "fork", "profile"])
def test_a_models_name_is_no_markup(command, capsys):
    sizes = ["--memory", "1GB", "--input", "3"] if command == "fit" else ["--input", "2x3"]
    assert main([command, "net[/a]:made", *sizes]) == 2
    assert "net[/a]" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"leannorm {leannorm.__version__}\n"


def test_the_shell_can_complete():
    words = {"_LEANNORM_COMPLETE": "complete_bash", "COMP_WORDS": "leannorm pro", "COMP_CWORD": "1"}
    assert in_a_process(env=os.environ | words).stdout.split() == ["profile"]


def test_a_page_without_its_libraries_is_refused_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["demo", "--report", str(tmp_path / "page.html")]) == 2
    err = capsys.readouterr().err
    assert "needs plotly" in err
    assert f"{sys.executable} -m pip install" in err
    assert list(tmp_path.iterdir()) == []


def test_info_names_versions_and_backends(capsys, tmp_path):
    path = tmp_path / "info.json"
    assert main(["info", "--json", str(path)]) == 0
    assert "reference" in capsys.readouterr().out
    data = json.loads(path.read_text())
    assert data["backends"]["reference"] == []
    assert data["facts"]["torch"].startswith("2.")


def test_info_says_what_mends_a_torchvision_that_does_not_fit(capsys, tmp_path, monkeypatch):
    """A package whose operators are not there, as where its library is built for another torch."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["info", "--json", str(tmp_path / "info.json")]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "does not exist" in line]
    assert len(told) == 1
    assert "pip uninstall -y torchvision && pip install torch==" in told[0]
    data = json.loads((tmp_path / "info.json").read_text())
    assert data["to_mend"] == told
    assert "does not fit" in data["facts"]["torchvision"]


@pytest.mark.conformance
def test_the_demo_in_a_pipe_prints_and_writes_everything(tmp_path):
    done = in_a_process(
        *[
            "demo",
            "--no-networks",
            "--epochs",
            "1",
            "--batch-size",
            "700",
            "--json",
            "/dev/full",
            "--report",
            "out.html",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("epoch", "held", "peak", "step time", "weights equal bit for bit"):
        assert part in done.stdout
    assert "\x1b" not in done.stdout  # no colour codes where there is no terminal
    assert json.loads((tmp_path / "out.json").read_text())["same"] is True
    assert (tmp_path / "out.html").stat().st_size > 1e6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json"]


MADE = "test_cli:made", "--input"
LONG = {  # what is typed, and lines that say what is done
    "profile": (
        [*MADE, "4x8", "--steps", "1"],
        ["making test_cli:made", "measuring conv", "timing, turn 1 of 1"],
    ),
    "fit": ([*MADE, "8", "--memory", "1MB"], ["making test_cli:made", "stock, batch 2"]),
    "doctor": ([*MADE, "4x8", "--fail-on", "error"], ["making test_cli:made", "looking at its norms"]),
    "check": ([*MADE, "4x8", "--steps", "1"], ["checking test_cli:made", "checked: lean, conv, step 1"]),
    "bench": (["--turns", "1"], ["timing", "timing small 2x64x4x4"]),
}


def made():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU())


@pytest.mark.parametrize("command", LONG)
def test_in_a_pipe_each_thing_that_is_done_is_a_line_at_once(command, monkeypatch):
    typed, said = LONG[command]
    monkeypatch.setitem(bench.__kwdefaults__, "cases", SMALL)
    lines = Unbuffered()
    with redirect_stdout(lines):
        assert main([command, *typed]) == 0
    for line in said:
        assert f"{line} ...\n" in lines.flushed


class Unbuffered(io.StringIO):
    """Keeps what was written when it was last flushed."""

    flushed = ""

    def flush(self):
        self.flushed = self.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted_it_leaves_no_traceback_and_no_file(tmp_path):
    running = subprocess.Popen(
        [*RUN, *f"demo --no-networks --epochs 500 --batch-size 128 --json {tmp_path}/a.json".split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored, where a shell's `&` is
    )
    # The first step of an optimizer imports torch._dynamo, and an interrupt while that loads is lost.
    assert [", epoch 2 " in running.stdout.readline() for _ in range(3)] == [False, False, True]
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err == "leannorm: stopped; no file was left half-written\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    with pytest.raises(InputError, match="there is no folder"):
        write_text(tmp_path / "not" / "here.txt", "text")


def test_importing_leannorm_brings_neither_extras_nor_the_command_line():
    code = """
        import sys, leannorm, leannorm.report.memory, leannorm._freed_memory
        unwanted = {"typer", "rich", "plotly", "jinja2", "sklearn", "torchvision", "timm"} & set(sys.modules)
        sys.exit(", ".join(sorted(unwanted)) or 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", code.replace("\n        ", "\n")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
