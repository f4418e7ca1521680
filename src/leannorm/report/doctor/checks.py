"""The checks, in the order in which findings of one severity are listed."""

from __future__ import annotations

from leannorm.report.doctor import measured, parallel, running, settings, wiring

CHECKS = (
    running.nonfinite_statistics,
    running.nonfinite_parameters,
    parallel.rank_settings,
    parallel.sync_group,
    parallel.rank_weights,
    parallel.partial_gradients,
    running.never_updated_statistics,
    running.momentum,
    measured.train_eval_gap,
    measured.modes_differ,
    wiring.unsynchronized_buffers,
    parallel.rank_buffers,
    running.averaged_buffers,
    settings.half_frozen,
    running.half_precision_statistics,
    wiring.shared_norm,
    wiring.repeated_call,
    measured.few_values,
    measured.few_samples,
    measured.padding_in_statistics,
    settings.gamma_zero,
    measured.dead_channels,
    settings.eps,
    settings.weight_decay,
    wiring.removed_bias,
)
