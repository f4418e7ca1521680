"""A program's file: small, read without running anything, and refused as a whole when it is not right."""

import json
import os
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch
from program_cases import stack

from leannorm import program
from leannorm._errors import InputError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("program") / "net.pt2"
    net = stack(torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.1))
    program.fork(net, (torch.randn(4, 3, 8, 8),)).save(path)
    return path


def rewritten(saved, tmp_path, change=None, replace=None):
    """The file with its text changed as data, or with whole entries replaced."""
    path = tmp_path / "changed.pt2"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = (replace or {}).get(name, old.read(name))
            if name == "program.json" and change is not None:
                text = json.loads(content)
                change(text)
                content = json.dumps(text).encode()
            new.writestr(name, content)
    return path


def node(text, target):
    return next(n for n in text["graph"]["nodes"] if n["target"].startswith(target))


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hacked",)


HOSTILE = {
    "a call of the system": lambda t: node(t, "aten::conv2d").update(target="posix::system"),
    "an attribute of torch.ops": lambda t: node(t, "aten::conv2d").update(
        target="aten::__init__.__globals__"
    ),
    "a library to load": lambda t: node(t, "aten::conv2d").update(target="load_library"),
    "an operator that opens files": lambda t: node(t, "aten::conv2d").update(
        target="aten::from_file.default"
    ),
    "another library": lambda t: node(t, "aten::conv2d").update(target="mylib::run.default"),
    "code as a node's name": lambda t: node(t, "aten::conv2d").update(name="x=__import__('os').system('id')"),
    "code as a variable": lambda t: node(t, "0.weight").update(target='0"), __import__("os").abort(), ("'),
    "code as an input": lambda t: node(t, "input").update(target="x=print(1)"),
    "code as a keyword": lambda t: node(t, "aten::conv2d").update(kwargs={"a=print(1),b": 1}),
    "code as a field": lambda t: t["structures"].update(
        train={"namedtuple": [None], "name": "A", "fields": ["a=1"]}
    ),
    "a kind of node that calls a method": lambda t: node(t, "aten::conv2d").update(op="call_method"),
    "dunder names": lambda t: node(t, "0.weight").update(target="__class__.__init__"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name, saved, tmp_path):
    with pytest.raises(InputError, match="is refused"):
        program.Program.load(rewritten(saved, tmp_path, HOSTILE[name]))


def test_a_pickle_in_any_place_is_not_unpickled(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(Hostile())
    bare = tmp_path / "bare.pt2"
    bare.write_bytes(pickled)
    checkpoint = tmp_path / "checkpoint.pt2"
    torch.save(Hostile(), checkpoint)
    for path in (
        bare,
        checkpoint,
        rewritten(saved, tmp_path, replace={"program.json": pickled}),
        rewritten(saved, tmp_path, replace={"data/0": pickled}),
    ):
        with pytest.raises(InputError, match=r"not a whole file written by Program\.save"):
            program.Program.load(path)
    assert not (tmp_path / "hacked").exists()


DAMAGED = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "without its last bytes": lambda data: data[:-30],
    "one flipped byte": lambda data: data[:-2500] + bytes([data[-2500] ^ 0xFF]) + data[-2499:],
    "text": lambda data: b"not a program",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_an_error_that_names_it(name, saved, tmp_path):
    path = tmp_path / "damaged.pt2"
    path.write_bytes(DAMAGED[name](saved.read_bytes()))
    with pytest.raises(InputError, match=r"damaged\.pt2 is not a whole file"):
        program.Program.load(path)


WRONG = {
    "a variable larger than its bytes": lambda t: t["variables"][0].update(shape=[10**6, 3]),
    "a variable too few": lambda t: t["variables"].pop(0),
    "no results": lambda t: t.pop("results"),
    "another version": lambda t: t.update(format="leannorm.program.99"),
    "an argument that comes later": lambda t: node(t, "aten::conv2d").update(args=[{"node": "linear"}]),
    "a name twice": lambda t: t["graph"]["nodes"].append(t["graph"]["nodes"][0]),
    "an operator that does not exist": lambda t: node(t, "aten::conv2d").update(
        target="aten::nothing.default"
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_contradicts_itself_is_an_error(name, saved, tmp_path):
    with pytest.raises(InputError, match=r"changed\.pt2 is"):
        program.Program.load(rewritten(saved, tmp_path, WRONG[name]))


def test_another_programs_file_is_an_error(tmp_path):
    path = tmp_path / "exported.pt2"
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(2),)), path)
    with pytest.raises(InputError, match=r"not a whole file written by Program\.save"):
        program.Program.load(path)
    with pytest.raises(FileNotFoundError):
        program.Program.load(tmp_path / "nothing.pt2")


def test_variables_are_stored_once(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 600))
    net[2].weight = net[0].weight
    program.fork(net, (torch.randn(2, 600),)).save(tmp_path / "net.pt2")
    weights = sum(t.nbytes for t in {t.data_ptr(): t for t in net.state_dict().values()}.values())
    assert (tmp_path / "net.pt2").stat().st_size < 1.05 * weights
    loaded = program.Program.load(tmp_path / "net.pt2")
    state = loaded.state_dict()
    assert state["0.weight"].data_ptr() == state["2.weight"].data_ptr()
    assert len(list(loaded.parameters())) == 5


def test_a_failed_save_leaves_the_old_file(saved, tmp_path):
    class Result(tuple):
        pass

    torch.utils._pytree.register_pytree_node(Result, lambda r: (list(r), None), lambda v, c: Result(v))

    class Net(torch.nn.Module):
        def forward(self, x):
            return Result((x + 1,))

    path = tmp_path / "net.pt2"
    path.write_bytes(saved.read_bytes())
    with pytest.raises(InputError, match="returns a Result, which a program's file cannot describe"):
        program.fork(Net(), (torch.ones(2),)).save(path)
    assert path.read_bytes() == saved.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_it_loads_in_a_process_that_never_saw_the_model(saved):
    code = f"""
import torch
from leannorm import program
net = program.Program.load({str(saved)!r})
y = net.train(torch.ones(4, 3, 8, 8) * torch.arange(4.0)[:, None, None, None])
y.sum().backward()
print(int(net.state_dict()["1.num_batches_tracked"]), all(p.grad is not None for p in net.parameters()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "1 True", done.stderr
