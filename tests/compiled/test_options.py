"""`compile_options()`: what it takes, what it says, what it leaves as it was."""

import copy
import hashlib
import importlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from compiling import Gated, assert_same, images, run_by_nodes, step
from torch import nn

import leannorm
from leannorm.compiled import internals, partition
from leannorm.planning.goal import Goal

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"recompute": "all"}, 'recompute is "norm" or "conv"; got \'all\''),
        ({"budget": 0.5, "peak": 0.5}, "one of budget, overhead and peak"),
        ({"peak": "8 apples"}, "a memory is written like 24GiB"),
        ({"mode": "fast"}, "mode is one of torch.compile's; got 'fast'"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(leannorm.InputError) as error:
        leannorm.compile_options(**arguments)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mode_brings_its_options():
    options = leannorm.compile_options("conv", mode="max-autotune-no-cudagraphs")
    assert options["max_autotune"] is True
    assert "custom_partitioner_fn" in options
    assert torch.compile(nn.Linear(2, 2), options=options) is not None  # torch takes all of them


def test_what_decides_a_plan_is_part_of_the_caches_keys():
    ours = [
        leannorm.compile_options(**how)["custom_partitioner_fn"]
        for how in ({}, {"budget": 0.5}, {"budget": 0.4})
    ]
    assert len({pickle.dumps(p) for p in ours}) == len({repr(p.uuid()) for p in ours}) == 3
    again = leannorm.compile_options(budget=0.5)["custom_partitioner_fn"]
    assert again.uuid() == ours[1].uuid()
    assert pickle.dumps(again) == pickle.dumps(ours[1])
    assert copy.deepcopy(again) is again
    assert pickle.loads(pickle.dumps(again)).goal == Goal(budget=0.5)


def test_other_code_and_prices_make_other_keys():
    from leannorm.compiled import options
    from leannorm.saving import rates

    found = options._identity(Goal(budget=0.5))
    root = Path(leannorm.__file__).parent
    files = sorted([*root.glob("planning/*.py"), *root.glob("compiled/*.py"), root / "saving" / "rates.py"])
    assert hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest() in found
    assert repr(rates.table(torch.device("cpu"))) in found


def test_what_is_promised_in_time_is_priced_by_this_device(monkeypatch, tmp_path):
    from leannorm.compiled import options
    from leannorm.planning.goal import NORM
    from leannorm.saving import rates

    of_table, bytes_of_table = (options._identity(goal) for goal in (NORM, Goal(budget=0.5)))
    device = torch.device("cpu")
    found = rates.table(device)._replace(memory=7e9, grouped=0.125)
    entry = {"made_by": rates._made_by(), **found._asdict()}
    (tmp_path / "rates.json").write_text(json.dumps({rates._name(device): entry}))
    monkeypatch.setenv("LEANNORM_RATES", str(tmp_path / "rates.json"))
    assert options._identity(NORM) != of_table
    assert repr(found) in options._identity(NORM)
    assert options._identity(Goal(budget=0.5)) == bytes_of_table


def test_a_report_before_anything_ran():
    report = leannorm.compile_options().report()
    assert report.graphs == ()
    assert report.reasons[0].startswith("no graph was planned in this process")


@pytest.mark.parametrize(
    "copied", [lambda options: pickle.loads(pickle.dumps(options)), copy.deepcopy], ids=["pickled", "copied"]
)
def test_a_copy_of_options_reports_what_it_planned(copied):
    options = leannorm.compile_options(budget=0.5, mode="max-autotune-no-cudagraphs")
    again = copied(options)
    assert again.keys() == options.keys()
    model = Gated()
    step(model, run_by_nodes(model, again), images(2, 24, 16))
    assert len(again.report().graphs) == 1
    assert options.report().graphs == ()


def test_a_report_adds_up():
    model, x = Gated(), images(2, 24, 16)
    options = leannorm.compile_options(budget=0.5)
    ours = step(model, run_by_nodes(model, options), x)
    report = options.report()
    assert report.held == ours.saved
    assert report.held <= 0.5 * report.stock_held
    assert report.reasons == []
    assert f" {report.held / report.stock_held:.2f} " in str(report)
    (graph,) = json.loads(report.to_json())["graphs"]
    assert (graph["held"], graph["stock_held"]) == (report.held, report.stock_held)
    freed = graph["stock_held"] - graph["held"]
    # the products of this model read in memory whatever is freed
    assert graph["written_again"] - graph["stock_written_again"] >= freed > 0


@pytest.mark.parametrize(
    ("how", "least"), [({"budget": 0.01}, "of the bytes"), ({"peak": "1KiB"}, "the least")]
)
def test_an_unreachable_goal_gives_what_there_is_and_says_so(how, least):
    model, x = Gated(), images(2, 24, 16)
    options = leannorm.compile_options(**how)
    step(model, run_by_nodes(model, options), x)
    (reason,) = options.report().reasons
    assert "out of reach" in reason
    assert least in reason


def test_a_budget_that_lowers_no_peak_is_said():
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, x = nn.Sequential(*hidden, nn.Linear(64, 20_000)), torch.randn(8, 64)
    for budget, said in ((0.3, True), (1.0, False)):
        options = leannorm.compile_options(budget=budget)
        step(model, run_by_nodes(model, options), x)
        assert any("this budget frees memory" in reason for reason in options.report().reasons) is said


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
def test_a_graph_break_is_said():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Gated(), Gated()

        def forward(self, x):
            y = self.a(x)
            torch._dynamo.graph_break()
            return self.b(y)

    model, x = Broken().double(), images(2, 24, 16).double()
    options = leannorm.compile_options("conv")
    eager = step(model, model, x)
    assert_same(step(model, run_by_nodes(model, options), x), eager)
    report = options.report()
    assert len(report.graphs) == 2
    assert [reason for reason in report.reasons if reason.startswith("2 pieces were compiled")]


def test_open_sizes():
    model = Gated().double()
    options = leannorm.compile_options("conv")
    compiled = run_by_nodes(model, options, dynamic=True)
    for tokens in (24, 40):
        x = images(2, tokens, 16).double()
        assert_same(step(model, compiled, x), step(model, model, x))
    (graph,) = options.report().graphs  # one plan for all sizes
    assert graph.plan.ratio < 0.8


def test_a_model_that_needs_no_gradient():
    model = Gated().requires_grad_(False)
    options = leannorm.compile_options("conv")
    torch.testing.assert_close(run_by_nodes(model, options)(images(2, 24, 16)), model(images(2, 24, 16)))
    assert options.report().graphs == ()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
        ("torch._inductor.custom_graph_pass", "CustomPartitionerFn"),
        ("torch._inductor.config", "custom_partitioner_fn"),
    ],
)
def test_a_compiler_without_what_is_needed_compiles_as_without(monkeypatch, module, name):
    importlib.import_module("torch._functorch.partitioners")  # which itself needs the others to be imported
    monkeypatch.delattr(f"{module}.{name}")
    options = leannorm.compile_options("conv", mode="max-autotune-no-cudagraphs")
    assert "custom_partitioner_fn" not in options
    assert options["max_autotune"] is True
    (reason,) = options.report().reasons
    assert f"has no {module}.{name}" in reason
    assert "as without" in reason


@pytest.mark.parametrize("where", ["Lines", "plan", "Reader", "edited"])
@pytest.mark.sampled(of=2)
def test_a_plan_that_fails_leaves_torch_s_own(monkeypatch, where):
    """Whatever a graph holds that nobody thought of: the model is compiled, and a reason says why."""

    def fails(*args, **kwargs):
        raise RuntimeError("a graph\nof tomorrow")

    target = (partition.edited, "readers") if where == "edited" else (partition, where)
    monkeypatch.setattr(*target, fails)
    model, x = Gated().double(), images(2, 24, 16).double()
    options = leannorm.compile_options("conv")
    ours = step(model, run_by_nodes(model, options), x)
    monkeypatch.undo()
    assert_same(ours, step(model, model, x))
    assert ours.saved == step(model, run_by_nodes(model), x).saved
    (reason,) = options.report().reasons
    assert reason.endswith("RuntimeError: a graph of tomorrow")


def test_bans_that_were_renamed_are_left_alone(monkeypatch):
    monkeypatch.setattr(internals, "_BANS", ("ban_of_yesterday",))
    model, x = Gated().double(), images(2, 24, 16).double()
    options = leannorm.compile_options("conv")
    assert_same(step(model, run_by_nodes(model, options), x), step(model, model, x))


@pytest.mark.filterwarnings("ignore:leannorm. compiled code ran within lean")
def test_lean_says_what_to_type_for_compiled_code():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with leannorm.lean("norm") as saved:
        run_by_nodes(model)(torch.randn(4, 8)).sum()
    assert "torch.compile(model, options=leannorm.compile_options())" in " ".join(saved.reasons)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_another_backend_is_named_among_the_reasons(backend):
    options = leannorm.compile_options("conv")
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend=backend, options=options)
    model(torch.randn(4, 8)).sum().backward()
    assert "a backend other than inductor" in options.report().reasons[0]


def test_torch_s_own_modules_compiled_in_place_are_named_among_the_reasons():
    """Torch compiles nothing there, without a word; from 2.15 on it does."""
    options = leannorm.compile_options("conv")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model.compile(options=options)
    model(torch.randn(4, 8)).sum().backward()
    report = options.report()
    said = ".compile() compiles nothing: torch.compile(model, options=...)"
    assert said in " ".join(report.reasons) or (report.graphs and TORCH >= (2, 14))


def test_a_tensor_of_a_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    model, x = Gated().double(), images(2, 24, 16).double()
    options = leannorm.compile_options("conv")
    both = TwoTensor(x.clone(), 2 * x).requires_grad_()
    run_by_nodes(model, options)(both).square().sum().backward()
    assert options.report().held < 0.7 * options.report().stock_held
    for mine, given in ((both.grad.a, x), (both.grad.b, 2 * x)):
        torch.testing.assert_close(mine, step(model, model, given).gradients["x"])
