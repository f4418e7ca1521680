"""Twenty models: every fault is found in its layer and in no other, and a model without faults has none."""

import warnings

import pytest
from doctor_faults import CHECK_OF, faults_for
from doctor_models import NAMES, SAMPLE, batch, fresh, trained

from leannorm import doctor

REST = [name for name in NAMES if name not in SAMPLE]
EVERY = [*SAMPLE, *(pytest.param(name, marks=pytest.mark.conformance) for name in REST)]


def told(report):
    return [(one.check, one.layer) for one in report.findings]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        yield


@pytest.mark.parametrize("name", EVERY)
def test_a_model_without_faults_has_no_findings(name):
    for report in (doctor(fresh(name)), doctor(fresh(name), batch(name, 3))):
        if name == "transformers:MobileNetV2":
            assert {one.check for one in report.findings} == {"momentum"}
            assert [one.value for one in report.findings] == [0.997] * 52
        elif (
            name == "timm:repvgg_a0"
        ):  # its beta is random at the start, as in a checkpoint without statistics
            assert {one.check for one in report.findings} == {"never_updated_statistics"}
        else:
            assert told(report) == []
    model = trained(name)
    assert told(doctor(model)) == []
    assert told(doctor(model, [batch(name, seed) for seed in (3, 4)])) == []
    assert told(doctor(model.eval(), batch(name, 5))) == []


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("name", EVERY)
def test_every_planted_fault_is_found_in_its_layer(name):
    missed = []
    for fault in faults_for(trained(name)):
        model = trained(name)
        planted = fault(model)
        report = doctor(model, batch(name, 3) if planted.data else None, optimizer=planted.optimizer)
        check = CHECK_OF.get(fault.__name__, fault.__name__)
        layers = [one.layer for one in report.findings if one.check == check]
        if layers[:1] != [planted.layer] or (len(layers) > 1 and not planted.spreads):
            missed.append((fault.__name__, planted.layer, told(report)))
    assert missed == []
