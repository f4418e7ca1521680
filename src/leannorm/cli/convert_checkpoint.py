"""`leannorm convert-checkpoint`: convert a checkpoint from one framework to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leannorm.cli.options import JsonFile, ModelOption, terminal

if TYPE_CHECKING:
    from leannorm.interop.checkpoints.conventions import Convention

FRAMEWORKS = "torch (or pytorch), paddle, keras, tensorflow (or tf), flax or onnx"
# the arguments in the library's messages, and what a user types for them here
_TYPED = {
    "pass names={'layer here': 'layer there'}; strict=False passes over what is missing or surplus": (
        "give --names HERE=THERE"
    ),
    "pass count=N*H*W": "give --count N*H*W",
    "count=math.inf": "--count inf",
    "pass eps=": "give --eps",
    "pass momentum=": "give --momentum",
    "pass like= one": "give --like one",
    "save those with target='torch'": "write those with --to torch",
    "names must map": "--names must map",
    "target 'caffe'": "--to caffe",
}


def convert_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="The file to read.")],
    model: ModelOption,
    source: Annotated[str, typer.Option("--from", help=f"The framework that wrote it: {FRAMEWORKS}, caffe.")],
    output: Annotated[
        Path | None, typer.Argument(help="The file to write; its suffix decides the format.")
    ] = None,
    named: Annotated[
        Path | None, typer.Option("--output", "-o", help="The same, as an option.", metavar="FILE")
    ] = None,
    target: Annotated[
        str, typer.Option("--to", help=f"The framework to write it for: {FRAMEWORKS}.")
    ] = "torch",
    names: Annotated[
        list[str] | None,
        typer.Option(help="A layer's name here and in the input file; repeatable.", metavar="HERE=THERE"),
    ] = None,
    to_names: Annotated[
        list[str] | None, typer.Option(help="The same for the output file.", metavar="HERE=THERE")
    ] = None,
    count: Annotated[
        float | None,
        typer.Option(help="Values behind each variance of a training batch, N*H*W; inf keeps variances."),
    ] = None,
    eps: Annotated[float | None, typer.Option(help="The norms' eps, if the file does not state it.")] = None,
    momentum: Annotated[float | None, typer.Option(help="The same, by the source's definition.")] = None,
    like: Annotated[
        Path | None, typer.Option(help="For .h5, .keras, .onnx: a file of the same network from the target.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Convert a checkpoint between frameworks: names, axes, variance. Prints what the file does not state."""
    import dataclasses
    import warnings

    from leannorm import interop
    from leannorm._errors import InputError
    from leannorm._files import check_writable, write_json
    from leannorm.cli.models import model_named

    if (output is None) == (named is None):
        raise InputError("name the file to write once: OUTPUT or -o FILE; its suffix decides the format")
    output = output or named
    assert output is not None
    check_writable(output)
    there, here = _pairs("--names", names), _pairs("--to-names", to_names)
    # checked first; `count` is passed on only if the framework's variance is biased
    reads, writes = _convention(source, "--from"), _convention(target, "--to")
    built = model_named(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", interop.ConventionWarning)
        with _as_typed():
            loaded = interop.load(
                built,
                checkpoint,
                reads.framework,
                names=there,
                count=count if reads.biased_running_var else None,
                eps=eps,
                momentum=momentum,
            )
        counted = count if writes.biased_running_var else None
        with _as_typed({"--names": "--to-names"}):
            interop.save(built, output, writes.framework, names=here, count=counted, like=like)
    console = terminal()
    notes = [_typed(str(warning.message)) for warning in caught]
    for note in notes:
        console.print(f"note: {note}", style="yellow")
    for layer, settings in loaded.settings.items():
        arguments = ", ".join(f"{name}={value:g}" for name, value in settings.items())
        console.print(f"make {layer or 'the layer'} with {arguments}: {output.name} does not hold it")
    if json:
        write_json(json, dataclasses.asdict(loaded) | {"notes": notes})
        console.print(f"numbers: {json}")
    console.print(f"{len(loaded.loaded)} tensors converted: {output}", style="bold green")


def _convention(name: str, flag: str) -> Convention:
    from leannorm._errors import InputError
    from leannorm.cli.models import did_you_mean
    from leannorm.interop.checkpoints.conventions import ALIASES, CONVENTIONS

    names = {known: known for known in CONVENTIONS} | ALIASES | {"tf": "tensorflow"}
    if name not in names:
        raise InputError(f"{flag} must be one of {', '.join(names)}; got {name!r}{did_you_mean(name, names)}")
    return CONVENTIONS[names[name]]


@contextmanager
def _as_typed(flags: Mapping[str, str] = {}) -> Iterator[None]:
    """Errors of the library name this command's flags; `flags` replaces some of those."""
    from leannorm._errors import InputError

    try:
        yield
    except InputError as error:
        told = _typed(str(error))
        for flag, other in flags.items():
            told = told.replace(flag, other)
        raise InputError(told) from error


def _typed(message: str) -> str:
    for argument, flag in _TYPED.items():
        message = message.replace(argument, flag)
    return message


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    from leannorm._errors import InputError

    pairs = {}
    for text in texts or ():
        here, equals, there = text.partition("=")
        if not equals:
            raise InputError(f"{option} must be HERE=THERE, got {text!r}")
        pairs[here] = there
    return pairs
