// Statistics and parameters as the coefficients of the kernels.
#pragma once

#include <memory>

#include "channel_plan.h"

namespace leannorm {

// The coefficients of one set: how its statistics and the parameters of its channels become one value for every
// channel, or for every slot of folded columns. Each thread computes those that it uses.
class SetCoefficients {
 public:
  SetCoefficients(ElementType type, const Cut& cut, int64_t channels, const Values& weight, const Values& bias)
      : double_(type == kDouble), cut_(cut), channels_(std::max<int64_t>(1, channels)), weight_(weight), bias_(bias),
        size_(cut.channels() * cut.fold), values_(new float[7 * size_ * (double_ ? 2 : 1)]),
        scratch_(new double[5 * cut.channels()]) {}

  // The weights of a set's channels, until the next coefficients are set.
  const double* weights(int64_t set) { return parameters(set, weight_, one_channel(2), 1.0); }

  // mean and rstd: of all statistics.
  void set_forward(int64_t set, const Values& mean, const Values& rstd) {
    const int64_t n = cut_.channels(set), statistic = cut_.first_statistic(set);
    const double *const means = of_channels(0, n, mean, statistic), *const rstds = of_channels(1, n, rstd, statistic);
    const double *const scales = weights(set), *const biases = parameters(set, bias_, one_channel(3), 0.0);
    put(0, n, [&](int64_t j) { return means[j]; });
    put(1, n, [&](int64_t j) { return means[j] - (double_ ? means[j] : float(means[j])); });
    put(2, n, [&](int64_t j) { return rstds[j] * scales[j]; });
    put(3, n, [&](int64_t j) { return biases[j]; });
  }
  // Without these the statistics are constants. p and q: of the statistics from `first` on.
  void set_backward(int64_t set, const Values& rstd, const Values& p, const Values& q, int64_t first) {
    constant_ = false;
    const int64_t n = cut_.channels(set), statistic = cut_.first_statistic(set);
    const double* const rstds = of_channels(1, n, rstd, statistic);
    const double *const ps = of_channels(2, n, p, statistic - first), *const qs = of_channels(3, n, q, statistic - first);
    put(4, n, [&](int64_t j) { return rstds[j]; });
    put(5, n, [&](int64_t j) { return -rstds[j] * qs[j]; });
    put(6, n, [&](int64_t j) { return -rstds[j] * ps[j]; });
  }
  // From a chunk's first channel on.
  Coefficients at(int64_t index) const {
    const auto row = [&](int64_t k) -> const void* { return values_.get() + (k * size_ + index) * (double_ ? 2 : 1); };
    return {row(0), row(1), row(2), row(3), row(4), row(5), row(6), constant_};
  }

 private:
  // value(j) for each of the set's n channels: loops over plain arrays, because a channel may have few elements.
  template <class Value> void put(int64_t row, int64_t n, Value value) {
    if (double_) fill(reinterpret_cast<double*>(values_.get()) + row * size_, n, value);
    else fill(values_.get() + row * size_, n, value);
  }
  template <class S, class Value> void fill(S* to, int64_t n, Value value) {
    for (int64_t j = 0; j < n; ++j) to[j] = static_cast<S>(value(j));
    for (int64_t f = 1; f < cut_.fold; ++f) std::copy_n(to, n, to + f * cut_.channels());
  }
  // The parameters of a set's channels, in place or in `to`: repeated for every sample of the set.
  const double* parameters(int64_t set, const Values& of, double* to, double missing) const {
    const int64_t n = cut_.channels(set);
    if (n <= channels_) return of.read(cut_.first_channel(set) % channels_, n, to, missing);
    const double* const once = of.read(0, channels_, to, missing);
    for (int64_t at = once == to ? channels_ : 0; at < n; at += channels_) std::copy_n(once, channels_, to + at);
    return to;
  }
  double* one_channel(int64_t k) { return scratch_.get() + k * cut_.channels(); }
  // The values of statistics, from `first` on, one for each channel.
  const double* of_channels(int64_t k, int64_t n, const Values& values, int64_t first) {
    double* const to = one_channel(k);
    if (cut_.per_statistic == 1) return values.read(first, n, to, 0.0);
    if (n == 0) return to;
    const double* const given = values.read(first, n / cut_.per_statistic, one_channel(4), 0.0);
    cut_.each_channel(n, [&](int64_t j, int64_t statistic) { to[j] = given[statistic]; });
    return to;
  }

  const bool double_;
  const Cut cut_;
  const int64_t channels_;
  const Values weight_, bias_;
  const int64_t size_;
  bool constant_ = true;
  std::unique_ptr<float[]> values_;  // or float64, two places each; written before they are read
  std::unique_ptr<double[]> scratch_;
};

}  // namespace leannorm
