"""`leannorm demo`: what `lean()` saves on two common networks, and a training run that stays the same under
it."""

from __future__ import annotations

from typing import Annotated

import typer

from leannorm.cli.options import HtmlFile, JsonFile, tell, under_way


def demo(
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 6,
    batch_size: Annotated[int, typer.Option(help="Images in a batch.")] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights, batch order and dropout.")] = 0,
    networks: Annotated[bool, typer.Option(help="Also measure a ResNet-50 and a ViT.")] = True,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Train a digit network with and without lean(), compare all bits, and measure what lean() saves."""
    from leannorm.report.demo.demo import demo as show
    from leannorm.report.demo.saved import NETWORKS

    with under_way("training digits") as say:
        report = show(
            NETWORKS if networks else (),
            device=device,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            progress=say,
        )
    tell(report, json, html, passes=report)
