"""What random blocks are written from: layers, activations, flags, ways to keep a value, changes."""

HEAD = """
import os, sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import relu
CFG = {"relu": True}
ON = True
KEPT = []
TABLE = {}
HEARD = []
def maker():
    on = True
    def ask(): return on
    def turn():
        nonlocal on
        on = not on
    return ask, turn
ASK, TURN = maker()
def activated(y): return F.relu(y)
def kept(y):
    KEPT.append(y)
    return y
"""
LAYERS = {
    "relu": "nn.ReLU(inplace=True)",
    "act": "nn.SiLU()",
    "idle": "nn.Identity()",
    "drop": "nn.Dropout(0.3)",
    "conv0": "nn.Conv2d(4, 4, 1)",
    "conv1": "nn.Conv2d(4, 4, 3, padding=1)",
    "bn0": "nn.BatchNorm2d(4, eps=0.01)",
    "bn1": "nn.BatchNorm2d(4, eps=0.01)",
    "bn2": "nn.BatchNorm2d(4, eps=0.01)",
    "gn": "nn.GroupNorm(2, 4, eps=0.01)",
    "pair": "nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, eps=0.01))",
    "seq": "nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, eps=0.01), nn.ReLU(inplace=True))",
    "deep": "nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, eps=0.01)), nn.Identity(), "
    "nn.Sequential(nn.ReLU()), nn.BatchNorm2d(4, eps=0.01), nn.Mish())",
    "list": "nn.ModuleList([nn.BatchNorm2d(4, eps=0.01), nn.ReLU(), nn.BatchNorm2d(4, eps=0.01), nn.GELU()])",
    "child": "Inner()",
}
LAYER_NAMES = [
    "bn0",
    "bn1",
    "bn2",
    "relu",
    "act",
    "idle",
    "drop",
    "conv0",
    "conv1",
    "gn",
    "pair",
    "seq",
    "deep",
]
LAYER_NAMES += ["pair[1]", "seq[1]", "seq[2]", "deep[3]", "deep[4]", "list[0]", "list[1]"]
NORMS = [
    "self.bn0",
    "self.bn1",
    "self.bn2",
    "self.pair",
    "self.list[0]",
    "self.list[2]",
    "self.gn",
    "self.seq[1]",
]
FREQUENT = NORMS[:3] * 3 + NORMS[3:]
ACTS = [
    "self.relu({})",
    "self.relu({})",
    "self.act({})",
    "F.relu({})",
    "F.relu({}, inplace=True)",
    "F.silu({})",
    "F.gelu({}, approximate='tanh')",
    "F.leaky_relu({})",
    "F.leaky_relu({}, 0.2)",
    "F.hardtanh({}, inplace=True)",
    "torch.relu({})",
    "relu({})",
    "{}.relu()",
    "{}.relu_()",
    "{}.sigmoid()",
    "activated({})",
    "self.list[1]({})",
    "self.list[3]({})",
    "F.mish(input={})",
    "nn.functional.elu({})",
    "self.seq[2]({})",
]
FLAGS = [
    "self.flag",
    'CFG["relu"]',
    "ON",
    "self.training",
    "type(self).CLASS",
    "self.CLASS",
    "ASK()",
    'os.environ.get("LEANNORM_TEST_FLAG") is None',
    'option["on"]',
    "torch.is_grad_enabled()",
    "self.down is None",
    "self.se is not None",
]
KEEPS = [
    "self.feat = {}",
    "self.items.append({})",
    'self.table["y"] = {}',
    "KEPT.append({})",
    'TABLE["y"] = {}',
    "globals().update(LAST={}); KEPT.append(LAST)",
    "self.log = {}.sum().item()",
    "KEPT.append(str({}.abs().mean().item())[:4])",
    "keep = lambda: {}; KEPT.append(keep())",
    "def keep(): return {}\nKEPT.append(keep())",
    "KEPT.append(locals()[{!r}])",
    "KEPT.append([{} for _ in range(1)][0])",
    "KEPT.extend(t for t in [{}])",
    "self.calls = self.calls + {}.detach().mean()",
    "view = {}[0]; KEPT.append(view)",
    "try:\n    pass\nfinally:\n    KEPT.append({})",
    "KEPT.append(sys._getframe().f_locals[{!r}])",
    "{}.register_hook(lambda g: KEPT.append(g)) if {}.requires_grad else None",
    "assert kept({}) is not None",
]
SETUP = [
    "m.{0}.register_forward_hook(lambda mod, i, o: HEARD.append(o))",
    "m.{0}.register_forward_hook(lambda mod, i, o: o * 2)",
    "m.{0}.register_forward_pre_hook(lambda mod, i: HEARD.append(i[0]))",
    "m.{0}.register_full_backward_hook(lambda mod, i, o: HEARD.append(o[0]))",
    "m.{0}.eval()",
    "m.{0}.requires_grad_(False)",
    "m.{0} = m.{1}",
    "m.{0}.forward = lambda x: x * 0.5",
    "m.down = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, eps=0.01))",
    "m.se = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Sigmoid())",
    "m.down = m.bn2",
    "m.bn0.momentum = None",
    "m.bn0.running_mean = m.bn1.running_mean",
    "m.conv0 = nn.Identity()",
    "m.relu = nn.ReLU6()",
    "m.idle = m.drop",
    "m.bn1 = nn.BatchNorm2d(4, track_running_stats=False, affine=False, eps=0.01)",
]
LATER = [
    "m.flag = not m.flag",
    "m.relu = nn.Hardswish()",
    "m.act = nn.Identity()",
    "m.bn0 = nn.Identity()",
    "m.idle = nn.Tanh()",
    "m.seq[2] = nn.Mish()",
    "m.list[1] = nn.Sigmoid()",
    "del m.seq[1]",
    "m.deep.append(nn.ReLU())",
    "m.forward = lambda x: x.tanh()",
    *SETUP[:12],
]
LATER_GLOBAL = [
    'CFG["relu"] = not CFG["relu"]',
    "globals().update(ON=not ON)",
    "Block.CLASS = not Block.CLASS",
    "TURN()",
    'os.environ["LEANNORM_TEST_FLAG"] = "1"',
    '(Block.forward.__defaults__ or [{}])[0]["on"] = False',
    "globals().update(relu=torch.tanh)",
    "globals().update(activated=torch.tanh)",
    "Block.forward = lambda self, x: self.relu(self.bn0(x)) * 2",
    "Block.normalized = lambda self, x: self.bn1(x) * 2",
    "Block.both = lambda self, x: self.bn2(x) * 2",
]
