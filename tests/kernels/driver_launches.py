"""What CUDA's driver is called with by the autograd nodes in C++, where there is no device.

As a script, in a process that does not interpret: each launch by the driver has the arguments that Triton's
launcher in C gets for the first call of its kind.
"""

from __future__ import annotations

import ctypes
import itertools

import stand_in_driver
import torch
from stand_in_driver import LAUNCHED, USUAL, numbered

from leannorm import nn
from leannorm.autograd.nodes import NODES
from leannorm.ops.backends.triton import launch, tape

CALLED: list[tuple] = []
LETTERS: dict[int, str] = {}  # by a kernel's handle
TYPES = {"p": ctypes.c_uint64, "0": ctypes.c_uint64, "i": ctypes.c_int32, "l": ctypes.c_int64}
TYPES |= {"f": ctypes.c_float, "d": ctypes.c_double}
COUNTS = [ctypes.c_uint] * 7


@ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *COUNTS,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
def driver(  # noqa: PLR0913
    function, x, y, z, threads, ty, tz, shared, stream, arguments, more
):
    assert (ty, tz, more) == (1, 1, None)
    letters = [letter for letter in LETTERS[function] if letter != "-"]
    values = [TYPES[letter].from_address(arguments[i]).value for i, letter in enumerate(letters)]
    CALLED.append((x, y, z, stream, function, (threads, shared), *values))
    return REFUSES[0]


REFUSES = [0]


def as_the_driver_takes_it(launched: tuple) -> tuple:
    """A call of Triton's launcher as one of the driver's."""
    *where, function, cooperative, pdl, scratch, profile, metadata, _, _, _ = launched[:13]
    assert (cooperative, pdl, scratch, profile) == (False, False, None, None)
    letters, taken = LETTERS[function], []
    for letter, value in zip(letters, launched[13:], strict=False):
        if letter == "-":
            continue
        value = value.data_ptr() if isinstance(value, torch.Tensor) else value
        taken.append(TYPES[letter](value).value)
    warps, _, shared = metadata
    return (*where, function, (32 * warps, shared), *taken, *(0 for letter in letters if letter == "0"))


def main() -> None:
    stand_in_driver.prepare()
    way = launch._drivers_way

    def noted(compiled):
        found = way(compiled)
        assert found is not None, compiled.name
        LETTERS[found[0]] = found[3]
        return found

    launch._drivers_way = noted
    NODES.set_driver(ctypes.cast(driver, ctypes.c_void_p).value)
    layers = [(lambda: nn.LayerNorm(70000), (3, 70000)), *USUAL]
    for dtype, is_recorded in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64), (True, False)
    ):
        for make, shape in layers:
            tape.forget()
            layer = make().to(dtype)
            x, dy = (torch.randn(shape, dtype=dtype) for _ in range(2))
            given = [x.requires_grad_(), dy, *layer.parameters(), *layer.buffers()]
            for turn in range(3):
                LAUNCHED.clear()
                CALLED.clear()
                with torch.set_grad_enabled(is_recorded):
                    y = layer(x)
                if is_recorded:
                    y.backward(dy)
                if turn == 0:
                    first = [numbered(as_the_driver_takes_it(one), given) for one in LAUNCHED]
            assert not LAUNCHED, (shape, dtype)
            again = [numbered(one, given) for one in CALLED]
            assert first == again, (shape, dtype, first, again)
            assert again
    LAUNCHED.clear()
    REFUSES[0] = 201  # there is no context in this thread
    with torch.no_grad():
        layer(x)
    assert len(LAUNCHED) == len(first), "what the driver refuses, Triton launches"


if __name__ == "__main__":
    main()
