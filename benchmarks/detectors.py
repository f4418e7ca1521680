"""`lean()` on torchvision's detectors and a segmenter: kept activations, peak memory and step time.

    python -m benchmarks.detectors [NETWORK ...] [--json FILE]

All numbers are relative to plain PyTorch. Each network is trained with the settings of `lean()` and with a
checkpoint around every block of the backbone, alternating, and gradients are compared. ResNets are set up as
for fine-tuning: their norms and their first stage are frozen. Plain torch formulas replace torchvision's
compiled operators, which work with few builds of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import held
from benchmarks.architectures import import_torchvision


def _suppress(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Boxes that do not overlap a box of higher score by more than the threshold."""
    from torchvision.ops import box_iou

    overlap, dropped = box_iou(boxes, boxes), torch.zeros(len(boxes), dtype=torch.bool)
    kept: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        if not dropped[i]:
            kept.append(i)
            dropped |= overlap[i] > threshold
    return torch.tensor(kept, dtype=torch.long)


def _align(
    x: Tensor, boxes: Any, size: Any, scale: float = 1.0, ratio: int = -1, aligned: bool = False
) -> Tensor:
    from torchvision.ops import roi_align
    from torchvision.ops._utils import convert_boxes_to_roi_format

    formula = unwrap(roi_align.__globals__["_roi_align"])  # it compiles itself
    height, width = (size, size) if isinstance(size, int) else size
    rois = boxes if isinstance(boxes, Tensor) else convert_boxes_to_roi_format(boxes)
    aligned_: Tensor = formula(x, rois, scale, height, width, ratio, aligned)
    return aligned_


def _without_compiled_operators() -> Any:
    """torchvision, with non-maximum suppression and RoI align that need no compiled library."""
    import_torchvision()
    import torchvision
    from torchvision.ops import boxes, poolers

    boxes.nms = _suppress
    poolers.roi_align = lambda input, boxes, output_size, spatial_scale=1.0, sampling_ratio=-1: _align(
        input, boxes, output_size, spatial_scale, sampling_ratio
    )
    return torchvision


_SIZE = 128
_SMALL = {"min_size": _SIZE, "max_size": _SIZE}
_FEW = {"rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20, "box_batch_size_per_image": 16}


class Network(NamedTuple):
    name: str
    settings: dict[str, int]
    frozen: bool = True


NETWORKS = {
    "fasterrcnn": Network("fasterrcnn_resnet50_fpn", _SMALL | _FEW),
    "maskrcnn": Network("maskrcnn_resnet50_fpn", _SMALL | _FEW),
    "retinanet": Network("retinanet_resnet50_fpn", _SMALL),
    "fcos": Network("fcos_resnet50_fpn", _SMALL),
    "ssdlite": Network("ssdlite320_mobilenet_v3_large", {}, frozen=False),
    "deeplabv3": Network("deeplabv3_resnet50", {}, frozen=False),
}


def network(name: str) -> nn.Module:
    """The network with random weights. If `frozen`, its norms have the statistics of one batch."""
    torchvision = _without_compiled_operators()
    torch.manual_seed(0)
    made, settings, frozen = NETWORKS[name]
    package = torchvision.models.segmentation if name == "deeplabv3" else torchvision.models.detection
    model: Any = getattr(package, made)(weights=None, weights_backbone=None, num_classes=5, **settings)
    model.train()
    if frozen:
        body = model.backbone.body
        with torch.no_grad():
            body(images())
        _freeze(body)
        body.conv1.requires_grad_(False)
        body.layer1.requires_grad_(False)
    return model


def _freeze(module: nn.Module) -> None:
    from torchvision.ops.misc import FrozenBatchNorm2d

    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            norm = FrozenBatchNorm2d(child.num_features)
            norm.load_state_dict(child.state_dict())
            setattr(module, name, norm)
        _freeze(child)


def images() -> Tensor:
    return torch.rand(2, 3, _SIZE, _SIZE, generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, boxes: int = 2) -> Tensor:
    """The loss of a training step with this many boxes in each image."""
    torch.manual_seed(1)  # proposals are sampled at random
    if not hasattr(model, "transform"):
        return sum(y.square().mean() for y in model(images()).values())
    found = torch.tensor([[5.0, 5.0, 60.0, 50.0], [30.0, 20.0, 90.0, 90.0]])[:boxes]
    labels, masks = torch.tensor([1, 3])[:boxes], torch.ones(boxes, _SIZE, _SIZE, dtype=torch.uint8)
    target = {"boxes": found, "labels": labels, "masks": masks}
    losses: Any = model(list(images()), [dict(target), dict(target)])
    return sum(losses.values())


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in ("Bottleneck", "InvertedResidual")]


def measure(name: str) -> Iterator[held.Row]:
    """Yield the rows of one network."""
    model = network(name)
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def loss() -> Tensor:
        model.load_state_dict(state)
        return loss_of(model)

    for row in held.rows(model, loss, _blocks(model), clears=False, turns=7):
        yield {"network": name, **row}


def main() -> None:
    options = held.parsed(held.parser_of(__doc__, NETWORKS, "NETWORK"))
    found = (row for name in options.names or NETWORKS for row in measure(name))
    held.tell(options, found, "network", "setting")


if __name__ == "__main__":
    main()
