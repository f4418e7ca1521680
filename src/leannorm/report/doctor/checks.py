"""The table of checks: a name that stays, how bad it is, what its value counts, the function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from leannorm.report.doctor import measured, running, settings, wiring
from leannorm.report.doctor.subject import Found, Subject

SEVERITIES = ("error", "warning", "note")


class Check(NamedTuple):
    """One row; `title` heads the findings, `unit` says what their value is.

    `of_data`: it judges the values of the batches, which says nothing where these are made up.
    """

    name: str
    severity: str
    title: str
    unit: str
    find: Callable[[Subject], Iterator[Found]]
    of_data: bool = False


CHECKS = (
    Check(
        "nonfinite_statistics",
        "error",
        "Running statistics are not finite",
        "not finite",
        running.nonfinite_statistics,
    ),
    Check(
        "nonfinite_parameters",
        "error",
        "Gamma or beta is not finite",
        "not finite",
        running.nonfinite_parameters,
    ),
    Check(
        "never_updated_statistics",
        "error",
        "Running statistics were never updated",
        "batches",
        running.never_updated_statistics,
    ),
    Check("momentum", "warning", "Momentum forgets at once, or never learns", "", running.momentum),
    Check(
        "train_eval_gap",
        "warning",
        "Batches are far from the running statistics",
        "standard deviations",
        measured.train_eval_gap,
        of_data=True,
    ),
    Check(
        "modes_differ",
        "warning",
        "The two modes give different outputs",
        "of the output's size",
        measured.modes_differ,
        of_data=True,
    ),
    Check(
        "unsynchronized_buffers",
        "warning",
        "Ranks have statistics of their own",
        "layers",
        wiring.unsynchronized_buffers,
    ),
    Check("half_frozen", "warning", "Half frozen", "", settings.half_frozen),
    Check(
        "half_precision_statistics",
        "warning",
        "Running statistics in 16 bits",
        "",
        running.half_precision_statistics,
    ),
    Check("shared_norm", "warning", "One batch norm in several places", "places", wiring.shared_norm),
    Check("repeated_call", "warning", "Called more than once a step", "calls", wiring.repeated_call),
    Check("few_values", "warning", "Few values behind each statistic", "values", measured.few_values),
    Check(
        "padding_in_statistics",
        "warning",
        "Padding in the statistics",
        "of the positions",
        measured.padding_in_statistics,
        of_data=True,
    ),
    Check("gamma_zero", "warning", "Gamma is 0", "channels", settings.gamma_zero),
    Check("dead_channels", "warning", "Dead channels", "channels", measured.dead_channels, of_data=True),
    Check("eps", "warning", "eps is out of place", "", settings.eps),
    Check("weight_decay", "note", "Weight decay on gamma or beta", "", settings.weight_decay),
    Check("removed_bias", "note", "A bias that the norm removes", "values", wiring.removed_bias),
)
