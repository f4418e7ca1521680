"""What a batch is, in every function that takes one and as it is typed; what is none is one clear line."""

import importlib.util
import re

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import leannorm
from leannorm._batch import call, inputs_of, positional
from leannorm._errors import InputError
from leannorm.cli import main
from leannorm.cli.inputs import made, specs_of
from leannorm.cli.models import model_named


class Language(nn.Module):
    """Takes tokens, and a mask that may be left out."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50)

    def forward(self, input_ids, attention_mask=None, scale=1.0):
        x = self.norm(self.embed(input_ids)) * scale
        return self.head(x if attention_mask is None else x * attention_mask.unsqueeze(-1))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x, shift):
        return self.bn(x + shift)


IDS = torch.randint(50, (2, 8))
NAMED = {"input_ids": IDS, "attention_mask": torch.ones(2, 8)}


@pytest.mark.parametrize(
    "inputs", [IDS, (IDS,), NAMED, (IDS, torch.ones(2, 8))], ids=lambda i: type(i).__name__
)
@pytest.mark.sampled(of=2)
def test_every_function_takes_a_tensor_a_tuple_and_a_mapping(inputs):
    model = Language()
    report = leannorm.profile(model, inputs, recompute=["norm"], steps=1)
    assert report.settings[1].gradient_difference == 0
    assert report.inputs == inputs_of(inputs).described()
    expected = inputs_of(inputs).call(model.eval())
    program = leannorm.program.fork(model, inputs)
    assert torch.equal(inputs_of(inputs).call(program.infer), expected)
    sample = {"input_ids": IDS[0]} if isinstance(inputs, dict) else IDS[0]
    assert leannorm.fit(Language, sample, "1MB", recompute=["norm"]).fits[0].batch > 2


def test_a_fold_takes_one_tensor_and_names():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(3, 4)
    for inputs in (x, (x,), {"input": x}):
        assert len(leannorm.fold(net, inputs).folded) == 1


def test_a_tensor_is_one_batch():
    """Not as many as it has samples."""
    layer, x = nn.BatchNorm1d(4), torch.randn(16, 4)
    report = leannorm.recalibrate(layer, x)
    assert (report.layers[0].batches, report.layers[0].values) == (1, 16)
    torch.testing.assert_close(layer.running_mean, x.mean(0))
    assert leannorm.doctor(layer, x).batches == 1


def test_of_a_tuple_a_model_is_given_what_its_forward_must_have():
    x, labels = torch.randn(8, 4), torch.zeros(8)
    assert torch.equal(call(nn.Identity(), (x, labels)), x)
    report = leannorm.recalibrate(Two(), [(x, torch.ones(8, 4), labels)])
    assert report.layers[0].values == 8


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_is_given_what_its_own_forward_must_have(wrap):
    batches = [(torch.randn(8, 4), torch.randn(8, 4), torch.zeros(8)) for _ in range(2)]
    plain, inner = Two(), Two()
    leannorm.recalibrate(plain, batches)
    leannorm.recalibrate(wrap(inner), batches)
    assert torch.equal(inner.bn.running_mean, plain.bn.running_mean)
    assert torch.equal(inner.bn.running_var, plain.bn.running_var)


def test_names_become_positions_with_the_defaults_between():
    assert positional(Language(), {"scale": 2.0, "input_ids": IDS}) == (IDS, None, 2.0)
    for inputs, words in (({"ids": IDS}, "got 'ids'"), ({"scale": 1.0}, "must have 'input_ids'")):
        with pytest.raises(InputError, match=words):
            positional(Language(), inputs)


class Masked(nn.Module):
    """Its mask is optional, as a language model's."""

    def __init__(self):
        super().__init__()
        self.norm, self.masks = nn.BatchNorm1d(4), 0

    def forward(self, x, mask=None):
        self.masks += mask is not None
        return self.norm(x)


TAKERS = {
    "recalibrate": lambda model, batches: leannorm.recalibrate(model, batches).layers[0].batches,
    "doctor": lambda model, batches: leannorm.doctor(model, batches).batches,
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_a_tuple_is_one_batch_and_a_list_is_several(take):
    x, mask, model, seen = torch.randn(8, 4), torch.ones(8), Masked(), []
    model.norm.register_forward_pre_hook(lambda norm, inputs: seen.append(model.masks))
    assert take(model, (x, mask)) == 1
    assert seen[-1] > 0
    model.masks = 0
    assert take(model, [(x, mask), (x, mask)]) == 2  # of a loader's what the forward must have
    assert seen[-1] == 0
    assert take(model, iter([x, x, x])) == 3
    with pytest.raises(
        InputError, match=r"those of Masked\.forward \(x, mask\), .* a tuple is one batch, pass"
    ):
        take(model, x.new_ones(3, 8, 4).unbind())
    with pytest.raises(InputError, match=r"got 8x4, 8x4, 8x4, and 97 more: too many"):
        take(model, x.new_ones(100, 8, 4).unbind())


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.norm = nn.LSTM(3, 8), nn.BatchNorm1d(8)

    def forward(self, packed):
        assert isinstance(packed, PackedSequence)
        return self.norm(self.rnn(packed)[0].data)


def sequences():
    return pack_sequence([torch.randn(n, 3) for n in (9, 6, 2)])


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_a_packed_sequence_is_one_input(take):
    model, packed = Speech(), sequences()
    assert take(model, packed) == 1
    assert take(model, [packed, sequences()]) == 2
    assert inputs_of(packed).args == (packed,)
    report = leannorm.recalibrate(model, packed)
    assert report.layers[0].values == 17
    with torch.no_grad():
        torch.testing.assert_close(model.norm.running_mean, model.rnn(packed)[0].data.mean(0))


X = torch.randn(4, 3, 8, 8)


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


NO_MODEL = "is for a torch.nn.Module, got "
WRONG = {
    "convert": (lambda: leannorm.convert(42), f"convert {NO_MODEL}int"),
    "preview": (lambda: leannorm.transforms.preview("x"), f"preview {NO_MODEL}str"),
    "make_lean": (lambda: leannorm.make_lean("x"), f"make_lean {NO_MODEL}str"),
    "unmake_lean": (lambda: leannorm.unmake_lean(None), f"unmake_lean {NO_MODEL}NoneType"),
    "freeze": (lambda: leannorm.freeze(nn.Linear), f"freeze {NO_MODEL}type"),
    "unfreeze": (lambda: leannorm.unfreeze([]), f"unfreeze {NO_MODEL}list"),
    "doctor": (lambda: leannorm.doctor(42), f"doctor {NO_MODEL}int"),
    "fork": (lambda: leannorm.program.fork(42, X), f"fork {NO_MODEL}int"),
    "profile": (lambda: leannorm.profile(42, X), f"profile {NO_MODEL}int"),
    "recalibrate": (lambda: leannorm.recalibrate(42, X), f"recalibrate {NO_MODEL}int"),
    "accumulate": (lambda: leannorm.accumulate_stats(42).__enter__(), f"accumulate_stats {NO_MODEL}int"),
    "fold": (lambda: leannorm.fold(42, X), "fold takes a module or a program, got int"),
    "fit": (lambda: leannorm.fit(42, (3, 8, 8), "1MB"), "fit takes a model, or a function that makes it"),
    "a part": (lambda: leannorm.freeze(net(), match="backbone"), "it is of none; their names are '1'"),
    "a match": (lambda: leannorm.freeze(net(), match=3), "match must be a part's name or a function"),
    "no batches": (lambda: leannorm.recalibrate(net(), None), "batches must be a tensor, a tuple, a mapping"),
    "an array": (lambda: leannorm.profile(net(), X.numpy()), "got numpy.ndarray; make a tensor of it"),
    "arrays": (lambda: leannorm.doctor(net(), numpy.ones((4, 3, 8, 8))), "make a tensor of it"),
    "a number": (lambda: leannorm.recalibrate(net(), [3]), "a batch must be a tensor, a tuple or a mapping"),
    "no inputs": (lambda: leannorm.profile(net(), ()), "inputs must be a tensor, a tuple or a mapping, got"),
    "no names": (lambda: leannorm.profile(net(), {}), "got an empty mapping"),
    "other names": (
        lambda: leannorm.profile(net(), {"foo": X}),
        "inputs must be those of Sequential.forward (input), got foo=4x3x8x8: ",
    ),
    "names of a batch": (lambda: leannorm.recalibrate(net(), {"foo": X}), "of Sequential.forward (input)"),
    "too many": (lambda: leannorm.fit(net, (X[0], X[0]), "1GB"), "those of Sequential.forward (input)"),
    "odd names": (lambda: leannorm.profile(net(), {1: X}), "got the key 1"),
    "no unit": (lambda: leannorm.fit(net, (3, 8, 8), "8"), "got '8' without its unit"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
def test_what_is_no_model_and_no_batch_is_said(wrong, words):
    with pytest.raises(InputError, match=re.escape(words)):
        wrong()


def test_a_model_without_anything_to_freeze_is_named():
    with pytest.warns(UserWarning, match="freeze found no norm layer with running statistics in Linear"):
        leannorm.freeze(nn.Linear(2, 2))


def test_a_part_is_frozen_by_its_name():
    model = nn.ModuleDict({"stem": net(), "stem2": net()})
    leannorm.freeze(model, match="stem")
    assert (model["stem"][1].training, model["stem2"][1].training) == (False, True)


def test_inputs_are_read():
    torch.manual_seed(0)
    ids, mask, x = (
        made(specs_of([text]), torch.bfloat16) for text in ("2x512:int64<9", "2x4:bool=1", "2x3x4")
    )
    assert (ids.dtype, ids.shape, int(ids.max())) == (torch.int64, (2, 512), 8)
    assert mask.all()
    assert x.dtype == torch.bfloat16
    assert len(made(specs_of(["2x3", "2x4"]), torch.float32)) == 2
    named = made(specs_of(["input_ids=2x8:int32<50", "scale=2x8:float32"]), torch.bfloat16)
    assert {name: t.dtype for name, t in named.items()} == {"input_ids": torch.int32, "scale": torch.float32}


UNREADABLE = {
    "2x8:int64": "whole numbers need a range",
    "2x8:int64<0": "whole numbers need a range",
    "2x8:uint8<300": "uint8 holds whole numbers up to 255",
    "2x8:int65<3": "an input's dtype is one of float32",
    "2x8:float32<3": "a range is for whole numbers",
    "ids=": "an input is written as its sizes",
}


@pytest.mark.parametrize(("text", "words"), UNREADABLE.items(), ids=UNREADABLE)
def test_inputs_that_cannot_be_read_are_refused(text, words):
    with pytest.raises(InputError, match=words):
        specs_of([text])
    with pytest.raises(InputError, match="name all inputs or none"):
        specs_of(["ids=2x8", "2x8"])


LANGUAGE = ["test_inputs:Language", "--input"]


def test_commands_take_tokens_and_names(capsys):
    assert main(["profile", *LANGUAGE, "2x8:int64<50", "--steps", "1", "--dtype", "bfloat16"]) == 0
    assert "2x8:int64" in capsys.readouterr().out
    two = ["input_ids=2x8:int64<50", "--input", "attention_mask=2x8:int64=1"]
    assert main(["check", "--model", *LANGUAGE, *two, "--steps", "1"]) == 0
    assert main(["doctor", *LANGUAGE, *two]) == 0
    assert main(["fork", *LANGUAGE, *two]) == 0
    assert main(["fit", *LANGUAGE, "8:int64<50", "--memory", "1MiB"]) == 0
    assert "1MiB" in capsys.readouterr().out
    assert main(["profile", *LANGUAGE, "2x8"]) == 2
    assert "tokens are whole numbers, as '2x512:int64<32000'" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_configuration_of_transformers_is_small_and_can_be_set():
    model = model_named("hf:llama,num_hidden_layers=2,vocab_size=100")
    assert (len(model.model.layers), model.config.hidden_size, model.config.vocab_size) == (2, 256, 100)
    ids = torch.randint(100, (2, 8))
    report = leannorm.profile(model, {"input_ids": ids, "labels": ids}, recompute=["norm"], steps=1)
    assert report.settings[1].gradient_difference == 0
    for text, words in (("hf:lama", "did you mean llama"), ("hf:llama,hidden=3", "no number 'hidden=3'")):
        with pytest.raises(InputError, match=words):
            model_named(text)
