"""The largest batch of a network of one's own in 64 MiB, by the function."""

from mymodel import make

import leannorm

report = leannorm.fit(make, (3, 32, 32), "64MiB", budgets=[0.5])
report.print()
print({one.name: one.batch for one in report.fits})
