"""Imported first where a library imports torchvision: where that does not fit torch, says what mends it.

A script of yours needs the line that it prints instead, once; `leannorm info` prints it too.
"""

import sys

from leannorm.report.fitting import import_torchvision

if (wrong := import_torchvision()) is not None:
    print(wrong, file=sys.stderr)
