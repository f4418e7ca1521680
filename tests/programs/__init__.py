"""Random training programs, run as stock autograd runs them and under `leannorm.lean()`: nothing may differ.

`language`: a program, its listing and what it may call; `run`: one run; `observe`: what autograd saves and
which edits are documented as unseen; `generate` and `operations`: random programs; `compare`: the verdict;
`shrink`: the short listing of a failure. Run all of it by `python -m programs`.
"""
