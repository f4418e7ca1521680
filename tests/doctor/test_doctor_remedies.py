"""Each remedy, run as printed on a trained model: its finding is gone, nothing else is found.

Evaluation is what it was, or what the remedy says that it becomes.
"""

import copy

import doctor_faults as faults
import pytest
import torch
from doctor_code import alternatives, run_as_printed
from doctor_models import batch, trained
from doctor_networks import network
from doctor_networks import trained as small
from torch import nn

import leannorm
from leannorm import doctor
from leannorm._catalog import norms_of

MODELS = {
    "torch's": small,
    "leannorm's": lambda: leannorm.convert(small()),
    "timm's": lambda: trained("timm:mobilenetv3_small_050"),
    "transformers'": lambda: trained("transformers:ResNet"),
}


def given(name, seed=3):
    """Batches of a model's data."""
    if name in ("torch's", "leannorm's"):
        return [
            torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(seed + i)) for i in range(4)
        ]
    model = "timm:mobilenetv3_small_050" if name == "timm's" else "transformers:ResNet"
    return [batch(model, seed + i, 16) for i in range(2)]


@torch.no_grad()
def evaluated(model, x):
    y = copy.deepcopy(model).double().eval()(x.double())
    return y if isinstance(y, torch.Tensor) else y.last_hidden_state


def off(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


def measured(model, batches):
    """The model with the statistics of these batches."""
    model = copy.deepcopy(model).train()
    leannorm.recalibrate(model, batches)
    return model


# what evaluation becomes: of the healthy model, the faulty one, or the healthy one on the batches' statistics
HEALTHY, FAULTY, MEASURED = (
    lambda healthy, faulty, batches: healthy,
    lambda healthy, faulty, batches: faulty,
    lambda healthy, faulty, batches: measured(healthy, batches),
)


def wide_momentum(model):
    """Of 1, by which statistics are those of the last batch: one that is unlike the others."""
    norm = faults.middle(faults.batch_norms(model))
    norm.module.momentum = 1.0
    norm.mean.add_(0.4 * norm.var.sqrt())
    return faults.Planted(norm.name, data=True)


def momentum_of_zero(model):
    norm = faults.middle(faults.batch_norms(model))
    norm.module.momentum = 0.0
    return faults.Planted(norm.name)


def bias_in_statistics(model):
    """A bias that training has put into the running mean."""
    planted = faults.removed_bias(model)
    source = model.get_submodule(planted.layer)
    (norm,) = (n for n in norms_of(model) if n.name == _behind(model, planted.layer))
    with torch.no_grad():
        source.bias.normal_(std=3.0)
        norm.mean.add_(source.bias)
    return planted


def _behind(model, name):
    """The name of the module behind it among the children of its parent."""
    path, _, own = name.rpartition(".")
    children = [child for child, _ in model.get_submodule(path).named_children()]
    return f"{path}.{children[children.index(own) + 1]}".removeprefix(".")


def left_out(model):
    norm = faults.middle(faults.batch_norms(model))
    ids = {id(p) for _, p in norm.affine}
    others = [p for p in model.parameters() if id(p) not in ids]
    return faults.Planted(norm.name, optimizer=torch.optim.SGD(others, 0.1, momentum=0.9, weight_decay=0.0))


def with_eps(model, eps):
    for norm in faults.batch_norms(model):
        norm.module.eps = eps
    return model


def eps_of_zero(model):
    """One that many published models have, beside it."""
    norm = faults.middle(faults.batch_norms(with_eps(model, 1e-12)))
    norm.module.eps = 0.0
    return faults.Planted(norm.name)


def in_half_precision(model):
    return faults.Planted(faults.batch_norms(model.bfloat16())[0].name)


def gamma_zero(model):
    """In a model that was trained with it."""
    planted = faults.gamma_zero(model)
    images = isinstance(model, nn.Sequential)
    leannorm.recalibrate(model, given("torch's" if images else "timm's", 9))
    return planted


PLANTED = {
    faults.nonfinite_statistics: (MEASURED, 1e-5),
    faults.negative_variance: (MEASURED, 1e-5),
    faults.nonfinite_parameters: (HEALTHY, 0.0),
    faults.never_updated_statistics: (MEASURED, 1e-5),
    in_half_precision: (FAULTY, 1e-6),
    faults.momentum: (MEASURED, 1e-5),
    wide_momentum: (MEASURED, 1e-5),
    momentum_of_zero: (FAULTY, 0.0),
    faults.train_eval_gap: (MEASURED, 1e-5),
    faults.frozen_by_requires_grad: (FAULTY, 0.0),
    faults.frozen_by_eval: (FAULTY, 0.0),
    left_out: (FAULTY, 0.0),
    bias_in_statistics: (FAULTY, 1e-5),
    faults.shared_norm: (MEASURED, None),
    faults.weight_decay: (FAULTY, 0.0),
    faults.eps_of_another_framework: (HEALTHY, 1e-5),
    faults.eps_below_rounding: (HEALTHY, 1e-5),
    eps_of_zero: (lambda healthy, faulty, batches: with_eps(healthy, 1e-12), 1e-5),
    gamma_zero: (FAULTY, 0.1),
}


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_every_remedy_as_printed(fault, name):
    becomes, most = PLANTED[fault]
    healthy, batches, which = MODELS[name](), given(name), 0
    while True:
        torch.manual_seed(0)
        model = copy.deepcopy(healthy)
        planted = fault(model)
        batches = [one.to(next(model.parameters()).dtype) for one in batches]
        shown = batches if planted.data else None
        before = doctor(model, shown, optimizer=planted.optimizer)
        assert planted.layer in [one.layer for one in before.findings]
        codes = alternatives(before.findings)
        if which == len(codes):
            assert which > 0
            break
        faulty, modes = copy.deepcopy(model), [m.training for m in model.modules()]
        names = {"model": model, "batches": batches, "optimizer": planted.optimizer}
        run_as_printed(codes[which], {**names, "checkpoint": copy.deepcopy(healthy.state_dict())})
        for seen in (None, batches):
            after = doctor(model, seen, optimizer=planted.optimizer)
            assert after.findings == [], codes[which]
        if "freeze(" not in codes[which] and ".train()" not in codes[which]:
            assert [m.training for m in model.modules()][: len(modes)] == modes
        if most is not None:
            expected = evaluated(becomes(healthy, faulty, batches), batches[0])
            assert off(evaluated(model, batches[0]), expected) <= most, codes[which]
        if planted.optimizer:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            planted.optimizer.step()  # with the groups that it has now
        which += 1


@pytest.mark.parametrize("fault", [f for f in PLANTED if f in faults.BATCH], ids=lambda fault: fault.__name__)
def test_a_remedy_leaves_a_model_in_evaluation_mode_there(fault):
    model = small().eval()
    planted = fault(model)
    report = doctor(model, given("torch's") if planted.data else None)
    for code in alternatives(report.findings) if report.findings else ():
        tried = copy.deepcopy(model)
        run_as_printed(code, {"model": tried, "batches": given("torch's")})
        assert not any(m.training for m in tried.modules())
        assert doctor(tried, given("torch's")).findings == [], code


def test_the_momentum_of_batch_norm_op_weighs_the_old_value():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), leannorm.nn.BatchNormOp(4, momentum=0.01))
    (finding,) = doctor(model).findings
    run_as_printed(finding.remedy, {"model": model})
    assert model[1].momentum == 0.99
    assert doctor(model).findings == []


def test_eps_by_the_name_that_a_layer_has():
    class T5LayerNorm(nn.Module):
        def __init__(self, eps):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(4)), eps

    model = nn.Sequential(*(T5LayerNorm(eps) for eps in (1e-6, 1e-6, 1e-2)))
    (finding,) = doctor(model).findings
    run_as_printed(finding.remedy, {"model": model})
    assert model[2].variance_epsilon == 1e-6
    assert doctor(model).findings == []


def test_a_frozen_encoder_and_a_new_head():
    """What mends the encoder leaves the head, and a head that is frozen as it was made is found."""
    model = nn.Sequential(small().requires_grad_(False), network(8)[1:]).train()
    findings = doctor(model).findings
    assert {(one.check, one.layer) for one in findings} == {("half_frozen", f"0.{i}.1") for i in range(3)}
    (code,) = alternatives(findings)
    run_as_printed(code, {"model": model})
    assert doctor(model).findings == []
    assert all(
        m.training and m.weight.requires_grad for m in model[1].modules() if isinstance(m, nn.BatchNorm2d)
    )

    leannorm.freeze(model)
    findings = doctor(model).findings
    assert {(one.check, one.layer) for one in findings} == {
        ("never_updated_statistics", f"1.{i}.1") for i in (1, 2)
    }
    (code,) = alternatives(findings)
    run_as_printed(code, {"model": model, "batches": given("torch's")})
    assert doctor(model, given("torch's")).findings == []
    assert not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))


def test_layers_that_no_batch_reaches_are_asked_for_their_values_alone():
    """As peft keeps the original of a module that it trains a copy of."""

    class Saved(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.original = copy.deepcopy(module).requires_grad_(False)
            self.original[1].momentum = 0.9
            self.saved = module

        def forward(self, x):
            return self.saved(x)

    model = nn.Sequential(small(), Saved(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    report = doctor(model, given("torch's"), optimizer=optimizer)
    assert [(one.check, one.layer) for one in report.findings] == [("removed_bias", "1.saved.0")]
    model[1].original[1].running_var[0] = float("nan")
    report = doctor(model, given("torch's"), optimizer=optimizer)
    assert report.findings[0].layer == "1.original.1"


class Follower:
    """A model, and one that follows in its parameters alone."""

    def __init__(self, wrapped):
        self.model, self.averaged = small(), copy.deepcopy(small())
        for block in self.averaged:
            block[1].reset_running_stats()
        if wrapped:
            self.averaged = torch.optim.swa_utils.AveragedModel(self.averaged)
        self.averaged.eval()


@pytest.mark.parametrize("wrapped", [False, True], ids=["a copy", "AveragedModel"])
def test_a_model_that_follows(wrapped):
    batches = given("torch's")
    for which in range(2):
        torch.manual_seed(0)
        job = Follower(wrapped)
        findings = doctor(job.model, batches, averaged=job.averaged).findings
        assert {one.check for one in findings} == {"averaged_buffers"}
        code = alternatives(findings)[which]
        run_as_printed(code, {"model": job.model, "averaged": job.averaged, "batches": batches})
        assert doctor(job.model, batches, averaged=job.averaged).findings == []
        assert not job.averaged.training
        expected = job.model if which == 0 else measured(job.averaged, batches)
        assert off(evaluated(job.averaged, batches[0]), evaluated(expected, batches[0])) < 1e-6 or which == 0


def test_one_norm_in_three_places():
    """With the optimizer that trains it, and the statistics of each."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(network(3, 1) for _ in range(3))
            for head in self.heads[1:]:
                head[0][1] = self.heads[0][0][1]

        def forward(self, x):
            return sum(head(x) for head in self.heads)

    model, batches = Heads(), [torch.randn(16, 3, 8, 8) + i for i in range(3)]
    for one in batches:
        model(one)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.0)
    findings = [
        one for one in doctor(model, batches, optimizer=optimizer).findings if one.check == "shared_norm"
    ]
    (code,) = alternatives(findings)
    run_as_printed(code, {"model": model, "batches": batches, "optimizer": optimizer})
    assert doctor(model, batches, optimizer=optimizer).findings == []
    assert {id(p) for p in model.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
