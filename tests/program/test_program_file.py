"""A program's file: small, read without running anything, and refused as a whole when it is not right."""

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
import zlib

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


def parts_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(path, parts):
    with zipfile.ZipFile(path, "w") as new:
        for name, content in parts.items():
            new.writestr(name, content)
    return path


def rewritten(saved, tmp_path, change=None, replace=None):
    """The file with its text changed as data, or with whole parts replaced, and a list that fits it."""
    parts = {**parts_of(saved), **(replace or {})}
    if change is not None:
        text = json.loads(parts["program.json"])
        change(text)
        parts["program.json"] = json.dumps(text).encode()
    del parts["parts.json"]
    listed = {name: [len(content), zlib.crc32(content)] for name, content in parts.items()}
    return zipped(tmp_path / "changed.pt2", {**parts, "parts.json": json.dumps(listed)})


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


X = torch.arange(4.0 * 3 * 8 * 8).reshape(4, 3, 8, 8) / 100


def contents(loaded):
    return [loaded.graph, *loaded.state_dict(), *loaded.state_dict().values(), loaded.infer(X)]


def refused(path, expected):
    """Whether the file is refused; one that is not must hold and compute the same, to the bit."""
    try:
        loaded = program.Program.load(path)
    except InputError as error:
        message = str(error)
        return str(path) in message and "save" in message
    for mine, its in zip(contents(loaded), expected, strict=True):
        assert torch.equal(mine, its) if isinstance(mine, torch.Tensor) else str(mine) == str(its)
    return False


@pytest.mark.parametrize("part", ["program.json", "parts.json"])
def test_every_edit_of_one_digit_is_refused_at_load(part, saved, tmp_path):
    parts = parts_of(saved)
    text = parts[part].decode()
    digits = [m.start() for m in re.finditer(r"\d", text)]
    assert len(digits) > {"program.json": 150, "parts.json": 50}[part]
    for at in digits:
        edited = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        path = zipped(tmp_path / "edited.pt2", {**parts, part: edited})
        with pytest.raises(InputError, match=r"edited\.pt2 is .*save"):
            program.Program.load(path)


def test_a_flipped_byte_anywhere_is_refused_or_meant_nothing(saved, tmp_path):
    data, expected = saved.read_bytes(), contents(program.Program.load(saved))
    inside = set()
    with zipfile.ZipFile(saved) as archive:
        for part in archive.infolist():
            start = data.index(part.filename.encode(), part.header_offset) + len(part.filename)
            end = start + part.compress_size
            inside.update(set(range(start + 32, end)) - set(range(start, end, 11)))
    path = tmp_path / "flipped.pt2"
    places = sorted(set(range(len(data))) - inside)
    loaded = []
    for number, at in enumerate(places):
        flip = (0xFF, 1 << number % 8)[number % 3 != 0]
        path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
        if not refused(path, expected):
            loaded.append(at)
    assert 0 < len(loaded) < len(places) / 2  # times, versions and attributes of the zip format


def test_a_cut_or_lengthened_file_is_refused_or_whole(saved, tmp_path):
    data, expected = saved.read_bytes(), contents(program.Program.load(saved))
    path = tmp_path / "cut.pt2"
    for length in {*range(0, len(data), 97), *range(len(data) - 120, len(data))}:
        path.write_bytes(data[:length])
        assert refused(path, expected), length
    path.write_bytes(data + b"more")
    refused(path, expected)


def another(parts, tmp_path):
    torch.manual_seed(1)
    net = stack(torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.1))
    program.fork(net, (torch.randn(4, 3, 8, 8),)).save(tmp_path / "another.pt2")
    return parts_of(tmp_path / "another.pt2")


EXCHANGED = {
    "swapped": (
        lambda p, o: p.update({"data/0": p["data/1"], "data/1": p["data/0"]}),
        "a part data/0 that was changed since it was saved",
    ),
    "another program's variable": (lambda p, o: p.update({"data/0": o["data/0"]}), "a part data/0 that was"),
    "another program's text": (
        lambda p, o: p.update({"program.json": p["program.json"].replace(b"0.1", b"0.2")}),
        "a part program.json that was changed",
    ),
    "another program's list": (
        lambda p, o: p.update({"parts.json": o["parts.json"]}),
        "a part data/0 that was",
    ),
    "too many": (lambda p, o: p.update({"data/99": b"x"}), "a part 'data/99' that was not saved with it"),
    "a variable missing": (lambda p, o: p.pop("data/1"), "no part data/1"),
    "the text missing": (lambda p, o: p.pop("program.json"), "no part program.json"),
    "the list missing": (lambda p, o: p.pop("parts.json"), "no part parts.json"),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_parts_of_other_files_are_refused_and_named(name, saved, tmp_path):
    parts = parts_of(saved)
    change, words = EXCHANGED[name]
    change(parts, another(parts, tmp_path))
    with pytest.raises(
        InputError, match=f"is refused: it has {words}.*; take the file as Program.save wrote it"
    ):
        program.Program.load(zipped(tmp_path / "exchanged.pt2", parts))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_parts_of_one_name_are_refused(saved, tmp_path):
    path = zipped(tmp_path / "twice.pt2", parts_of(saved))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("data/0", archive.read("data/0"))
    with pytest.raises(InputError, match="two parts of one name"):
        program.Program.load(path)


def test_other_formats_are_refused_by_their_name(saved, tmp_path):
    first = parts_of(rewritten(saved, tmp_path, lambda t: t.update(format="leannorm.program.1")))
    del first["parts.json"]  # the first format had none
    with pytest.raises(
        InputError, match=r"'leannorm\.program\.1', which had no checksums.* save the program again"
    ):
        program.Program.load(zipped(tmp_path / "first.pt2", first))
    later = rewritten(saved, tmp_path, lambda t: t.update(format="leannorm.program.99"))
    with pytest.raises(InputError, match=r"the format 'leannorm\.program\.99', not 'leannorm\.program\.2'"):
        program.Program.load(later)


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


class OfParts(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.parts = torch.nn.ModuleDict({name: torch.nn.BatchNorm1d(4)})

    def forward(self, x):
        (norm,) = self.parts.values()
        return norm(x)


@pytest.mark.parametrize("name", ["größe", "卷积", "слой_1"])
def test_names_of_any_script_load_again(name, tmp_path):
    x = torch.randn(8, 4)
    forked = program.fork(OfParts(name), (x,))
    forked.train(x)
    forked.save(tmp_path / "net.pt2")
    loaded = program.Program.load(tmp_path / "net.pt2")
    assert torch.equal(loaded.infer(x), forked.infer(x))
    assert f"parts.{name}.weight" in loaded.state_dict()


@pytest.mark.parametrize("name", ["a(b", "__norm"])
def test_a_name_that_would_be_refused_is_not_saved(name, tmp_path):
    forked = program.fork(OfParts(name), (torch.randn(8, 4),))
    with pytest.raises(InputError, match=re.escape(f"cannot hold the name {name!r}; give that part another")):
        forked.save(tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []
