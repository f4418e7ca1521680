"""Imported before libraries that import torchvision: if torchvision does not fit torch, prints the fix.

Your own scripts do not need this file: run the printed command once. `leannorm info` prints it too.
"""

import sys

from leannorm.report.fitting import import_torchvision

if (wrong := import_torchvision()) is not None:
    print(wrong, file=sys.stderr)
