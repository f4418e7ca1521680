"""Norms of one launch: where the planner takes it, its numbers, and the bytes that the kernels move."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import ChannelCase
from kernel_cases import BF16, F32, F64, assert_close_to_reference, call_on, results
from stand_ins import on_device
from test_masked_channel_kernels import assert_close_to_reference as assert_masked_close
from test_masked_channel_kernels import mask_of, with_nan
from torch.utils._pytree import tree_leaves

from leannorm.ops.backends import TRITON, triton

pytestmark = pytest.mark.skipif(triton._UNAVAILABLE is not None, reason=str(triton._UNAVAILABLE))
interpreted = pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
H200, SECTOR = 132, 32


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Operators are called here without the backend, which would patch it."""
    if triton.INTERPRETED:
        from leannorm.ops.backends.triton.interpreted import patch_interpreter

        patch_interpreter()


def planned(shape, contiguous, groups=0, itemsize=2, **changed):
    from leannorm.ops.backends.triton import tiling

    return tiling.planned(shape, groups, contiguous, itemsize, H200, tiling.Choice(**changed))


ONE = [  # channels, side, contiguous
    *((c, n, True) for c, n in ((128, 28), (256, 14), (512, 14), (512, 7), (2048, 7))),
    *((c, n, False) for c, n in ((512, 14), (512, 7), (2048, 7))),
]
SEVERAL = [(64, 112, True), (256, 28, True), (64, 56, False), (128, 28, False), (256, 14, False)]
SEVERAL += [(1024, 14, False)]


@pytest.mark.parametrize(("channels", "side", "contiguous"), ONE)
def test_small_planes_of_many_channels_take_one_launch(channels, side, contiguous):
    shape = 128, channels, side, side
    plan = planned(shape, contiguous)
    assert plan.sets is not None
    assert planned(shape, contiguous, rounds=0).sets is None  # what turns it off
    programs, constants = plan.of_sets()
    assert programs >= 64
    tile = constants["TILE"].channels * constants["TILE"].elements * 2
    assert programs > H200 or tile >= 8 << 10  # enough is being loaded for a whole multiprocessor
    read = min(programs, H200 if plan.sets.alone else 4 * H200) * plan.sets.tiles(plan.geometry) * tile
    assert read < 50 << 20 or plan.sets.tiles(plan.geometry) <= 8  # the second time from the cache


@pytest.mark.parametrize(("channels", "side", "contiguous"), SEVERAL)
def test_large_planes_and_few_channels_take_several(channels, side, contiguous):
    assert planned((128, channels, side, side), contiguous).sets is None


@pytest.mark.parametrize(("channels", "side", "programs", "longer"), [(64, 56, 8, 368), (256, 14, 32, 18)])
def test_what_one_launch_of_few_channels_would_wait(channels, side, programs, longer):
    """In channels_last, as the docstring of the rule says."""
    from leannorm.ops.backends.triton import tiling

    geometry = tiling.geometry((128, channels, side, side), 0, contiguous=False)
    sets = tiling.set_tiling(geometry, 2, H200)
    assert sets.programs(geometry) == programs
    of_sets = sets, sets.tiles(geometry), programs
    assert tiling.more_rounds(*of_sets, 2, H200, tiling.DEFAULT) == longer > tiling.DEFAULT.rounds
    said = " ".join(tiling.__doc__.split())
    assert re.search(rf"\b{programs}\b[^.]* 128×{channels}×{side}²", said)
    assert re.search(rf"\b{longer} rounds longer", said)


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_batch_decides_how_many_tiles_and_not_what_is_compiled(contiguous):
    for _, channels, side in {(0, c, n) for c, n, _ in ONE}:
        plans = [planned((n, channels, side, side), contiguous) for n in (2, 3, 17, 40, 128)]
        assert len({plan.sets for plan in plans if plan.sets is not None}) == 1


@pytest.mark.parametrize(
    ("shape", "groups", "side"),
    [
        ((32, 256, 64, 64), 32, 2),
        ((32, 256, 32, 32), 32, 8),
        ((4, 320, 64, 64), 32, 1),
        ((8, 96, 16, 16), 12, 8),
    ],
)
def test_groups_of_channels_last_lie_side_by_side(shape, groups, side):
    """A program reads whole sectors, as many groups at a time as the cache holds twice."""
    plan = planned(shape, False, groups)
    assert plan.sets is not None
    assert plan.sets.side == side
    assert plan.sets.channels * 2 >= SECTOR
    assert side * shape[1] // groups <= plan.sets.channels
    assert planned(shape, False, groups, rounds=0).sets is None


@pytest.fixture
def as_on_an_h200(monkeypatch):
    """The tiles that an H200 gets, small as its inputs are here."""
    from leannorm.ops.backends.triton import tape

    tape.forget()
    on_device(monkeypatch, processors=H200)
    yield
    tape.forget()


PLANES = [
    (ChannelCase((37, 3, 7, 7)), F32, "relu", 0, False),
    (ChannelCase((5, 10, 5, 5)), BF16, "gelu", 0, True),
    (ChannelCase((19, 6, 4, 4)), F64, "identity", 0, False),
    (ChannelCase((70, 4, 6, 10)), BF16, "relu", 0, False),
    (ChannelCase((3, 9, 33, 70)), F32, "relu", 0, False),
    (ChannelCase((6, 24, 9, 9), "channels_last"), BF16, "relu", 0, True),
    (ChannelCase((3, 20, 6, 6), "channels_last"), F32, "silu", 2, False),
    (ChannelCase((2, 96, 7, 7), "channels_last"), BF16, "silu", 12, False),
    (ChannelCase((2, 21, 5, 5), "channels_last"), F32, "relu", 7, True),
    (ChannelCase((2, 40, 5, 9), "channels_last"), F64, "gelu", 4, False),
]


@interpreted
@pytest.mark.parametrize("given", PLANES, ids=lambda given: f"{given[0]}-{given[1]}-{given[3]}")
def test_the_numbers_are_the_references(as_on_an_h200, given):
    call = call_on(*given)
    assert planned(tuple(call.x.shape), call.x.is_contiguous(), call.groups).sets is not None
    assert_close_to_reference(call, TRITON)
    first, second = results(TRITON, call), results(TRITON, call)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@interpreted
@pytest.mark.parametrize("kind", ["random", "late"])
@pytest.mark.parametrize("given", [PLANES[0], PLANES[3], PLANES[7]], ids=lambda given: str(given[0]))
def test_padding_is_not_read(as_on_an_h200, given, kind):
    call = call_on(*given)
    mask = mask_of(tuple(call.x.shape), kind)
    assert_masked_close(TRITON, with_nan(call, mask), mask)


@interpreted
@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_groups_values_stay_in_their_group(as_on_an_h200, value):
    """Its neighbours in a tile have none of its NaN, and lose no digit by its squares."""
    call = call_on(*PLANES[7])
    plain = results(TRITON, call)
    call.x[1, 3, 2, 2] = value
    spoiled = results(TRITON, call)
    for name in ("y", "dx", "mean", "rstd"):
        there = torch.ones_like(plain[name], dtype=torch.bool)
        there[1, : there.shape[1] // 2] = False
        assert torch.equal(plain[name][there], spoiled[name][there]), name
    if value == 1e30:
        assert_close_to_reference(call._replace(dy=call.dy.clone()), TRITON)


class Traffic:
    """What the interpreter loads and stores in each launch of a call."""

    def __init__(self, monkeypatch, call):
        from triton.runtime.interpreter import InterpreterBuilder

        from leannorm.ops.backends.triton import tape
        from leannorm.ops.backends.triton.launch import launch

        # of each launch: the addresses that it moves at once, and its kernel
        self.launches, self.kernels = [], []

        def noted(kernel, *arguments, **constants):
            self.launches.append([])
            self.kernels.append(kernel.__name__)
            launch(kernel, *arguments, **constants)

        on_device(monkeypatch, launch=noted)
        for name, mask_at in (("create_masked_load", 1), ("create_masked_store", 2)):
            moves = self.moves(getattr(InterpreterBuilder, name), mask_at)
            monkeypatch.setattr(InterpreterBuilder, name, moves)
        tape.forget()
        self.result = call()
        monkeypatch.undo()
        tape.forget()

    def moves(self, plain, mask_at):
        def noted(builder, *given):
            mask = given[mask_at].data
            self.launches[-1].append(np.broadcast_to(given[0].data, mask.shape)[mask])
            return plain(builder, *given)

        return noted

    def of(self, tensor):
        """In each launch, which addresses of a tensor are read or written at once."""
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        inside = [[at[(at >= first) & (at < end)] for at in launch] for launch in self.launches]
        return [[at for at in launch if at.size] for launch in inside]

    def bytes(self, *tensors):
        """Of these and of the large tensors that the call made: once for each launch, all, and in sectors."""
        made = [t for t in tree_leaves(self.result) if isinstance(t, torch.Tensor) and t.dim() > 2]
        launches = [launch for t in (*tensors, *made) for launch in self.of(t) if launch]
        itemsize = tensors[0].element_size()
        return SimpleNamespace(
            once=sum(len(np.unique(np.concatenate(launch))) * itemsize for launch in launches),
            all=sum(len(at) * itemsize for launch in launches for at in launch),
            sectors=sum(len(np.unique(at // SECTOR)) * SECTOR for launch in launches for at in launch),
        )


MOVED = [  # shape, layout, groups, bytes forward and backward in sizes of the input
    ((6, 4, 7, 7), "contiguous", 0, (2, 3)),
    ((6, 16, 6, 6), "channels_last", 0, (2, 3)),
    ((3, 64, 8, 8), "channels_last", 8, (2, 3)),
]


@interpreted
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("shape", "layout", "groups", "moved"), MOVED)
def test_bytes_are_those_of_the_docstring(monkeypatch, shape, layout, groups, moved, several):
    """Of memory each launch moves every byte once; what a program reads again is in the cache."""
    from leannorm.ops.backends.triton import channel, channel_gradients, tiling

    call = call_on(ChannelCase(shape, layout), BF16, "silu", groups)
    weight, bias = call.weight, call.bias
    size = call.x.nbytes
    found = {}
    for which in ("forward", "backward"):
        with pytest.MonkeyPatch.context() as patch:
            on_device(patch, processors=H200, choice=tiling.Choice(rounds=0 if several else 16))
            if which == "forward":
                arguments = call.x, weight, bias, None, 1e-5, "silu", groups
                traffic = Traffic(patch, lambda a=arguments: channel.channel_forward(*a))
                _, mean, _, rstd, _ = traffic.result
                found[which] = traffic.bytes(call.x)
            else:
                arguments = call.dy, call.x, mean, rstd, weight, bias, None, None, "silu", groups, False
                traffic = Traffic(patch, lambda a=arguments: channel_gradients.channel_backward(*a))
                found[which] = traffic.bytes(call.x, call.dy)
    once = found["forward"].once / size, found["backward"].once / size
    assert once == ((3, 5) if several else moved)
    if not several:  # again from the cache: x, dy and x, and the first tile for a number near the mean
        assert 3 <= found["forward"].all / size <= 4
        assert found["backward"].all / size == 5


@interpreted
def test_groups_side_by_side_read_whole_sectors(monkeypatch):
    """Not half of each: 8 channels of a group are 16 bytes of a row."""
    from leannorm.ops.backends.triton import channel

    call = call_on(ChannelCase((2, 64, 8, 8), "channels_last"), BF16, "silu", 8)
    arguments = call.x, call.weight, call.bias, None, 1e-5, "silu", 8
    on_device(monkeypatch, processors=H200)
    found = Traffic(monkeypatch, lambda: channel.channel_forward(*arguments)).bytes(call.x)
    assert found.sectors == found.all


@pytest.mark.parametrize("kept", [520, 640, 768, 1024, 1152, 1280, 1536, 2048, 3072, 4096])
@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_rows_that_leave_lanes_idle_have_as_many_bytes_on_their_way(kept, shared):
    """As rows that fill their tile have: 64 KB of dy and x for each multiprocessor, where they fit."""
    from leannorm.ops.backends.triton import row_tiles

    how = row_tiles.backward(kept, 1, 2, 2, shared)
    assert how is not None
    loading = how.programs * (how.stages - 1) * how.tile.rows * kept * 2 * 2
    assert (
        loading >= 64 << 10
        or how.stages == 5
        or how.programs * how._replace(stages=how.stages + 1).shared(2, 2) > shared
    )
    assert how.stages == 3 or how.programs * how.shared(2, 2) <= shared
    assert (how.stages == 3) == (kept == how.tile.block) or shared < 163 << 10


@interpreted
def test_the_backward_pass_reads_each_row_once_and_a_groups_line_once_a_program(monkeypatch):
    """Three sizes of the input in whole sectors, a scale and two sums for each program, and their sum."""
    from leannorm.ops.backends.triton import rows

    groups, length, kept = 3, 40, 576
    shape = groups * length, kept
    x, dy = (torch.randn(shape).bfloat16() for _ in range(2))
    scale = torch.randn(groups, kept)
    mean, rstd = torch.randn(shape[0], 1), torch.rand(shape[0], 1)
    given = dy, None, x, mean, rstd, scale, 1, 2, False, True, True, 1.0
    want = rows.row_backward(*given)
    programs = []

    def called():
        run = rows.launch  # the one that notes

        def counted(kernel, count, *more, **constants):
            programs.append(count)
            run(kernel, count, *more, **constants)

        patch.setattr(rows, "launch", counted)
        return rows.row_backward(*given)

    with pytest.MonkeyPatch.context() as patch:
        on_device(patch, processors=2)
        traffic = Traffic(patch, called)
    torch.testing.assert_close(traffic.result, want)
    assert traffic.kernels == ["backward_tile", "sum_shares"]
    assert groups < programs[0] < groups * length
    for tensor in (x, dy, traffic.result[0]):
        loads, later = traffic.of(tensor)
        moved = np.concatenate(loads)
        assert len(np.unique(moved)) * 2 == len(moved) * 2 == x.nbytes
        for part in loads:  # of each load: only whole sectors
            assert len(np.unique(part // SECTOR)) * SECTOR == len(part) * 2
        assert not later
    assert sum(map(len, traffic.of(scale)[0])) == programs[0] * kept


@interpreted
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_program_reads_a_groups_lines_once_for_many_rows(monkeypatch, plain, rms):
    """Two sizes of the input, and a scale and a shift for each program, not for each tile of rows."""
    from leannorm.ops.backends.triton import launch, rows, tiling

    groups, length, kept, processors = 3, 40, 64, 1
    x, scale, shift = torch.randn(groups * length, kept), torch.randn(groups, kept), torch.randn(groups, kept)
    given = x, None, scale, shift, 1, 2, 1e-5, rms, 1.0, False
    want = rows.row_forward(*given)
    with pytest.MonkeyPatch.context() as patch:
        on_device(patch, processors=processors, choice=tiling.Choice(run_stages=0 if plain else 3))
        traffic = Traffic(patch, lambda: rows.row_forward(*given))
    torch.testing.assert_close(traffic.result, want)
    assert launch.listening.recorder is None
    of_x, of_scale, of_shift = (sum(map(len, traffic.of(t)[0])) * 4 for t in (x, scale, shift))
    assert of_x == x.nbytes
    assert traffic.kernels == ["forward_tile" if plain else "forward_run"]
    lines = groups * length if plain else groups * min(4 * processors // groups or 1, 2)
    assert of_scale == of_shift == lines * kept * 4
