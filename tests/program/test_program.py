"""A forked program against the eager model in both modes, bit for bit, and what its targets run."""

import copy
from xml.etree import ElementTree

import pytest
import torch
from program_cases import NETWORKS, ByMode, InPlace, Repeated, stack
from torch.utils import _pytree as pytree

from leannorm import functional, nn, program
from leannorm._errors import InputError


def image(batch=4):
    return torch.randn(batch, 3, 8, 8)


def assert_same(a, b):
    a, b = pytree.tree_flatten(a), pytree.tree_flatten(b)
    assert a[1] == b[1]
    for mine, theirs in zip(a[0], b[0], strict=True):
        assert mine is theirs or torch.equal(mine, theirs)


def assert_same_state(forked, eager):
    mine = forked.state_dict()
    assert all(torch.equal(mine[k], v) for k, v in eager.state_dict().items())
    gradients = {k: p.grad for k, p in forked.named_parameters()}
    assert_same([gradients[k] for k, _ in eager.named_parameters()], [p.grad for p in eager.parameters()])


def assert_runs_as(forked, eager, steps=3):
    """Training with an optimizer, inference in between: outputs, gradients and all state stay equal."""
    optimizers = [torch.optim.SGD(list(p), 0.1) for p in (forked.parameters(), eager.parameters())]
    for step in range(steps):
        x, outputs = image(), []
        for run, optimizer in zip((forked.train, eager.train()), optimizers, strict=True):
            torch.manual_seed(step)
            y = run(x.clone())
            optimizer.zero_grad()
            losses = [t.square().mean() for t in pytree.tree_leaves(y) if t is not None and t.requires_grad]
            if losses:
                sum(losses).backward()
            outputs.append(y)
        assert_same(*outputs)
        assert_same_state(forked, eager)
        for optimizer in optimizers:
            optimizer.step()
        torch.manual_seed(step)
        y = forked.infer(x.clone())
        torch.manual_seed(step)
        assert_same(y, eager.eval()(x.clone()))
        assert_same_state(forked, eager)


@pytest.mark.sampled(of=2)
@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")  # torch.export on a GRU
@pytest.mark.parametrize("name", NETWORKS)
def test_program_and_its_file_equal_the_eager_model(name, tmp_path):
    net = NETWORKS[name]()
    first, second = copy.deepcopy(net), copy.deepcopy(net)
    forked = program.fork(net, (image(),))
    forked.save(tmp_path / "net.pt2")
    assert_runs_as(forked, first)
    assert_runs_as(program.Program.load(tmp_path / "net.pt2"), second)


def test_variables_are_the_models_own():
    net = stack(torch.nn.BatchNorm2d(4))
    forked = program.fork(net, (image(),))
    assert {id(p) for p in forked.parameters()} == {id(p) for p in net.parameters()}
    assert forked.state_dict()["1.running_mean"].data_ptr() == net[1].running_mean.data_ptr()
    assert all(m.training for m in net.modules())


def branches(net):
    forked = program.fork(net, (image(),))
    return {
        b: [str(n.target) for n in forked.graph.nodes if n.op == "call_function" and n.meta["branch"] == b]
        for b in ("shared", "train", "infer")
    }


def test_the_fork_is_at_the_first_operator_that_differs():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.ReLU(), nn.BatchNorm2d(3), torch.nn.Tanh())
    parts = branches(net)
    assert parts["shared"] == ["aten.conv2d.default", "aten.relu.default"]
    assert parts["train"] == parts["infer"] == ["leannorm.tracked_batch_norm.default", "aten.tanh.default"]


def test_a_network_without_modes_does_not_fork():
    parts = branches(torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.ReLU(inplace=True)))
    assert not parts["train"]
    assert not parts["infer"]


def test_memory_that_one_branch_overwrites_is_not_shared():
    parts = branches(InPlace())
    assert not parts["shared"]  # inference overwrites the convolution's result
    assert "aten.conv2d.default" in parts["train"]


@pytest.mark.parametrize(
    ("targets", "runs", "moves"),
    [
        (("infer",), {"0", "infer"}, False),
        (("train",), {"0", "train"}, True),
        (("train", "infer"), {"0", "train", "infer"}, True),
        (("0",), {"0"}, False),
        (("infer:1",), {"0", "infer"}, False),
        (("train:1",), {"0", "train"}, True),
    ],
    ids=lambda v: str(v) if isinstance(v, bool) else "+".join(sorted(v)),
)
def test_only_what_a_target_needs_runs_and_changes_state(targets, runs, moves):
    net = stack(torch.nn.BatchNorm2d(4))
    forked = program.fork(net, (image(),))
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        values = forked.run(targets, (image(),))
    assert tuple(values) == targets
    assert (int(net[1].num_batches_tracked) == 1) == moves
    changed = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == ({"1.num_batches_tracked", "1.running_mean", "1.running_var"} if moves else set())
    part = forked._part(targets)
    executed = [n for n in part.graph.nodes if str(n.target) == "aten.batch_norm.default"]
    assert [n.args[5] for n in executed] == [b == "train" for b in ("train", "infer") if b in runs]
    assert forked._part(targets) is part


def test_the_other_branch_does_not_execute():
    """A branch made to fail shows that the other does not run it."""
    net = stack(nn.BatchNorm2d(4))
    forked = program.fork(net, (image(),))
    for node in forked.graph.nodes:
        if node.meta["branch"] == "train" and "batch_norm" in str(node.target):
            node.target = _fail
    forked.infer(image())
    with pytest.raises(ZeroDivisionError):
        forked.train(image())


def _fail(*args, **kwargs):
    raise ZeroDivisionError


def test_both_branches_at_once_train_first():
    net = stack(torch.nn.BatchNorm2d(4))
    other = copy.deepcopy(net)
    forked = program.fork(net, (image(),))
    x = image()
    both = forked.run(("infer", "train"), {"input": x})
    assert list(both) == ["infer", "train"]
    assert_same(both["train"], other.train()(x))
    assert_same(both["infer"], other.eval()(x))


def test_intermediate_values_are_those_of_the_modules():
    net = InPlace()
    forked = program.fork(net, (image(),))
    x, seen = image(), {}
    net.eval()
    for name in ("conv", "drop", "bn"):
        net.get_submodule(name).register_forward_hook(
            lambda m, a, y, name=name: seen.update({name: y.clone()})
        )
    result = net(x)
    values = forked.run(("infer:conv", "infer:drop", "infer:bn", "infer"), (x,))
    for name, value in seen.items():
        assert torch.equal(values[f"infer:{name}"], value), name  # as computed, though overwritten later
    assert_same(values["infer"], result)
    assert torch.equal(values["infer"][2], seen["conv"].relu())  # what the model returns is overwritten


def test_calls_of_one_module_have_names_and_effects_of_their_own():
    net = Repeated()
    forked = program.fork(net, (image(),))
    for branch in ("train", "infer"):
        assert {f"{branch}:bn", f"{branch}:conv@1", f"{branch}:bn@1"} < set(forked.names())
    forked.run("train:bn", (image(),))
    assert net.bn.num_batches_tracked == 1
    forked.run("train:bn@1", (image(),))
    assert net.bn.num_batches_tracked == 3


def test_intermediate_values_are_differentiable():
    net = stack(torch.nn.BatchNorm2d(4))
    value = program.fork(net, (image(),)).run("train:1", (image(),))["train:1"]
    value.square().sum().backward()
    assert net[0].weight.grad is not None
    assert net[4].weight.grad is None


def test_shared_effects_happen_once_when_both_branches_run():
    net = ByMode()
    forked = program.fork(net, (image(),))
    forked.run(("train", "infer"), (image(),))
    assert net.calls == 1
    forked.infer(image())
    assert net.calls == 2


class StatisticsOnly(torch.nn.Module):
    """Calls a function for what it does to the running statistics, and counts no batches."""

    def __init__(self, normalize):
        super().__init__()
        self.normalize = normalize
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        self.normalize(x, self.mean, self.var, training=self.training)
        return x + 1


@pytest.mark.parametrize(
    "normalize",
    [
        functional.batch_norm,
        functional.sync_batch_norm,
        lambda x, *state, **kwargs: functional.conv_batch_norm(
            x, torch.ones(3, 3, 1, 1), None, *state, **kwargs
        ),
    ],
    ids=["batch_norm", "sync_batch_norm", "conv_batch_norm"],
)
def test_statistics_without_a_count_of_batches_move(normalize):
    net = StatisticsOnly(normalize)
    forked, x = program.fork(net, (image(),)), image() + 2
    expected = copy.deepcopy(net)
    expected.train()(x), forked.train(x)
    assert expected.mean.all()
    assert_same_state(forked, expected)


def test_varying_batch():
    net = stack(nn.BatchNorm2d(4, momentum=None), torch.nn.Dropout(0.1))
    eager = copy.deepcopy(net)
    batch = torch.export.Dim("batch", min=2, max=64)
    forked = program.fork(net, (image(),), dynamic_shapes=({0: batch},))
    for n in (2, 7, 64):
        x = image(n)
        torch.manual_seed(n)
        a = forked.train(x)
        torch.manual_seed(n)
        assert torch.equal(a, eager.train()(x))
    with pytest.raises(InputError, match=r"input must have shape \(.*=2\.\.64, 3, 8, 8\), got \(65"):
        forked.infer(image(65))


BAD_CALLS = [
    (lambda p: p.infer(image(5)), "must have shape"),
    (lambda p: p.infer(image().double()), "must have dtype torch.float32"),
    (lambda p: p.infer(image(), image()), "the program takes input"),
    (lambda p: p.infer([1]), "takes input|must be a tensor"),
    (lambda p: p.run("train", {"x": image()}), "no input x"),
    (lambda p: p.run("train", {}), "need the input input"),
    (lambda p: p.run("bn9", (image(),)), "unknown target 'bn9'"),
    (lambda p: p.to_exported("test"), "a branch is 'train' or 'infer'"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=[m for _, m in BAD_CALLS])
def test_bad_calls_change_nothing(call, message):
    net = stack(torch.nn.BatchNorm2d(4))
    forked = program.fork(net, (image(),))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(InputError, match=message):
        call(forked)
    assert_same(list(net.state_dict().values()), list(before.values()))


class Unexportable(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("net", "inputs", "message"),
    [
        (Unexportable(), (image(),), "torch.export cannot trace Unexportable in the train mode"),
        (stack(), 42, "example_inputs must be a tensor, a tuple or a mapping, got int"),
    ],
    ids=["control flow", "no tuple"],
)
def test_what_cannot_be_forked_says_why_and_keeps_its_mode(net, inputs, message):
    net.eval()
    next(net.children(), net).train()
    modes = [m.training for m in net.modules()]
    with pytest.raises(InputError, match=message):
        program.fork(net, inputs)
    assert [m.training for m in net.modules()] == modes


@pytest.mark.parametrize("branch", ["train", "infer"])
@pytest.mark.parametrize("name", ["batch norm", "leannorm cumulative", "in place", "structure"])
@pytest.mark.sampled(of=2)
def test_one_branch_as_an_exported_program(name, branch):
    net = NETWORKS[name]()
    forked = program.fork(net, (image(),), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    exported = forked.to_exported(branch)
    assert isinstance(exported, torch.export.ExportedProgram)
    other = copy.deepcopy(net).train(branch == "train")
    x = image(6)
    torch.manual_seed(1)
    y = exported.module()(x.clone())
    torch.manual_seed(1)
    assert_same(y, other(x.clone()))


def test_description_and_picture_show_the_fork(tmp_path):
    forked = program.fork(stack(torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.1)), (image(),))
    text = forked.describe()
    assert repr(forked) == "Program(input (4, 3, 8, 8) float32)"
    assert "shared (1 operators)\n  0 Conv2d: conv2d\ntraining branch" in text
    assert "1 BatchNorm2d: add_.Tensor, batch_norm (changes num_batches_tracked, running_mean" in text
    forked.draw(tmp_path / "net.svg")
    picture = (tmp_path / "net.svg").read_text()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert picture.count("<title>2 Dropout: dropout") == 2
    for title in ("shared", "training branch", "inference branch"):
        assert f">{title}</text>" in picture


class Sliced(torch.nn.Module):
    def forward(self, x):
        return x.relu() * x.shape[0]


def test_sizes_that_no_module_asks_for_have_no_name_of_torchs(tmp_path):
    forked = program.fork(Sliced(), (image(),), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    assert "sym_size" in forked.describe()
    assert "_empty_nn" not in forked.describe()
