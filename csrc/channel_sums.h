// The two kinds of sums of a set, kept for each chunk until they are merged in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "channel_plan.h"

namespace leannorm {

// Writes a + b, rounded, into a; returns the rounding error (Knuth's two-sum).
inline double add_rounded(double& a, double b) {
  const double sum = a + b, of_b = sum - a, left = (a - (sum - of_b)) + (b - of_b);
  a = sum;
  return left;
}

// 0 if rounding has made it negative; NaN stays, which std::fmax would make 0.
inline double not_negative(double square) { return square < 0 ? 0.0 : square; }

// How many statistics a block has.
inline int64_t statistics_of(const Cut& cut, const Block& block) {
  return cut.columns ? block.length / block.each : block.statistics;
}

// Mean and sum of squared deviations of every chunk of a set; `merge` makes them those of the whole set. For float64
// input also the rounding errors of the means: these are subtracted from each other, and no type is wider. If a value
// is NaN, so are both; if one is infinite, the mean is that infinity and the other sum NaN.
class MomentPartials {
 public:
  MomentPartials(const Cut& cut, const Tensor& x)
      : cut_(cut), type_(element_type(x)), x_(data(x)), size_(cut.chunks * cut.slots),
        values_(new double[(type_ == kDouble ? 4 : 3) * size_]) {}

  void add(const ChannelKernels& kernels, int64_t set, int64_t i) {
    const Chunk chunk = cut_.chunk(set, i);
    add(kernels, chunk.block, x_ + chunk.offset * element_size(type_), mean_at(i));
  }

  // The moments of a whole set: a slot has `count` elements, the first `with_tail` one more; `left` may be null.
  struct Merged {
    int64_t slots, count, with_tail;
    const double *mean, *m2, *left;
  };
  Merged merge(int64_t set) {
    if (cut_.chunks == 0) return {};
    double *mean = mean_at(0), *m2 = mean + size_;
    const Chunk first = cut_.chunk(set, 0);
    const bool with_left = type_ == kDouble;
    int64_t count = count_of(first), slots = slots_of(first), with_tail = 0;
    for (int64_t i = 1; i < cut_.chunks; ++i) {
      const Chunk chunk = cut_.chunk(set, i);
      double *const other = mean_at(i), *const other_m2 = other + size_;
      const int64_t more = count_of(chunk), n = slots_of(chunk);
      const double weight = double(more) / double(count + more), between = double(count) * weight;
      for (int64_t j = 0; j < n; ++j) {
        double difference = other[j] - mean[j];
        if (with_left) difference += left_of(other)[j] - left_of(mean)[j];
        const double step = std::isfinite(difference) ? difference * weight : other[j];  // an infinite mean stays
        const double left = add_rounded(mean[j], step);
        if (with_left) left_of(mean)[j] += left;
        m2[j] += other_m2[j] + difference * difference * between;
      }
      if (n == slots) count += more;
      else with_tail = n;  // the last row of folded columns is not whole
    }
    return {slots, count, with_tail, mean, m2, with_left ? left_of(mean) : nullptr};
  }

 private:
  // Of a block: its means, followed by the other sums.
  void add(const ChannelKernels& kernels, const Block& block, const char* x, double* mean) const {
    if (cut_.columns && count_of(block) == 1) return take_row(x, statistics_of(cut_, block), mean);
    if (type_ == kDouble) return add_wide(kernels, block, x, mean);
    const bool alone = cut_.columns || block.statistics == 1;
    const int64_t missed = add_fast(kernels, block, x, mean, alone ? 2 : 1);
    if (missed == 0) return;
    if (alone) return add_wide(kernels, block, x, mean);
    // Each statistic separately, so that its bits do not depend on its neighbours.
    Block one = block;
    one.statistics = 1;
    const double* const fits = mean + 2 * size_;
    for (int64_t j = 0; j < block.statistics; ++j)
      if (fits[j] == 0) add(kernels, one, x + j * block.length * element_size(type_), mean + j);
  }

  // Differences from one of the values, in float64. float64 input, which has no wider type to be summed in, is summed
  // once more with the differences from the mean.
  void add_wide(const ChannelKernels& kernels, const Block& block, const char* x, double* mean) const {
    const int64_t slots = statistics_of(cut_, block), count = count_of(block);
    double *const m2 = mean + size_, *const sum = m2 + size_;
    for (int64_t j = 0; j < slots; ++j) mean[j] = first_value(block, x, j);
    for (int pass = 0; pass < (type_ == kDouble ? 2 : 1); ++pass) {
      for (int64_t j = 0; j < slots; ++j)
        if (!std::isfinite(mean[j])) mean[j] = 0;  // no difference from it is a number
      std::fill_n(sum, slots, 0.0);
      std::fill_n(m2, slots, 0.0);
      kernels.wide_moments[cut_.columns][type_](x, block, mean, sum, m2);
      for (int64_t j = 0; j < slots; ++j) {
        const double rest = sum[j] / count, left = add_rounded(mean[j], rest);
        if (type_ == kDouble) left_of(mean)[j] = left;
        if (std::isfinite(sum[j]) && std::isinf(m2[j])) continue;  // squares of finite values, beyond float64
        m2[j] = not_negative(m2[j] - rest * sum[j]);
      }
    }
  }

  // In float32, with differences from a first guess of the mean, and once more with those from the mean if the guess
  // was far from it (by more than two standard deviations), as long as there are guesses left. Returns how many
  // statistics do not fit: those whose squares leave the range of float32, and those far from the last guess; the
  // sums of the others become 1.
  int64_t add_fast(const ChannelKernels& kernels, const Block& block, const char* x, double* mean, int guesses) const {
    const int64_t slots = statistics_of(cut_, block), count = count_of(block);
    double *const m2 = mean + size_, *const sum = m2 + size_;
    const auto moments = kernels.moments[cut_.columns][type_];
    if (cut_.columns && block.each == 1) {  // of a few rows
      std::fill_n(mean, slots, 0.0);
      std::fill_n(sum, slots, 0.0);
      std::fill_n(m2, slots, 0.0);
      Block few = block;
      few.count = std::min<int64_t>(few.count, 8);
      moments(x, few, mean, sum, m2);
      const double each = 1.0 / few.count;
      for (int64_t j = 0; j < slots; ++j) mean[j] = float(sum[j] * each);
    } else {
      spread_means(block, x, slots, mean);
    }
    const double each = 1.0 / count, least = 1e-20 * count;
    for (;; --guesses) {
      std::fill_n(sum, slots, 0.0);
      std::fill_n(m2, slots, 0.0);
      moments(x, block, mean, sum, m2);
      int64_t near = 0, in_range = 0, constant = 0;
      for (int64_t j = 0; j < slots; ++j) {
        const double square = m2[j], rest = sum[j] * each, between = rest * sum[j];
        mean[j] += rest;
        m2[j] = square - between;
        const int64_t ranges = int64_t(square < 1e30) & int64_t(square > least);
        const int64_t nears = int64_t(between < 4 * (square - between));
        const int64_t zero = int64_t(square == 0) & int64_t(sum[j] == 0);
        in_range += ranges;
        near += nears;
        constant += zero;
        sum[j] = double((ranges & nears) + 2 * zero);
      }
      // One value, as after a ReLU, or values that differ by less than 4e-23, whose variance no eps would show.
      for (int64_t j = 0; constant > 0 && j < slots; ++j) {
        if (sum[j] != 2) continue;
        const int64_t is_first = mean[j] == first_value(block, x, j);
        sum[j] = double(is_first), near += is_first, in_range += is_first;
      }
      if (near == slots && in_range == slots) return 0;
      if (in_range != slots || guesses == 1) return slots;
      for (int64_t j = 0; j < slots; ++j) mean[j] = float(mean[j]);
    }
  }

  // A row: each statistic is of one value.
  void take_row(const char* x, int64_t slots, double* mean) const {
    switch (type_) {
      case kFloat: return take_row(reinterpret_cast<const float*>(x), slots, mean);
      case kDouble: return take_row(reinterpret_cast<const double*>(x), slots, mean);
      case kBFloat16: return take_row(reinterpret_cast<const c10::BFloat16*>(x), slots, mean);
      default: return take_row(reinterpret_cast<const c10::Half*>(x), slots, mean);
    }
  }
  template <class T> void take_row(const T* x, int64_t slots, double* mean) const {
    double* const m2 = mean + size_;
    for (int64_t j = 0; j < slots; ++j) mean[j] = x[j];
    for (int64_t j = 0; j < slots; ++j) m2[j] = mean[j] - mean[j];  // NaN where it is not finite
    if (type_ == kDouble) std::fill_n(left_of(mean), slots, 0.0);
  }

  double first_value(const Block& block, const char* x, int64_t slot) const {
    return value_at(type_, x, slot * (cut_.columns ? block.each : block.length));
  }

  // The mean of a few values from all parts of a statistic's planes: a single one may be far from the mean of all.
  void spread_means(const Block& block, const char* x, int64_t slots, double* mean) const {
    switch (type_) {
      case kFloat: return spread_means(block, reinterpret_cast<const float*>(x), slots, mean);
      case kBFloat16: return spread_means(block, reinterpret_cast<const c10::BFloat16*>(x), slots, mean);
      default: return spread_means(block, reinterpret_cast<const c10::Half*>(x), slots, mean);
    }
  }
  template <class T> void spread_means(const Block& block, const T* x, int64_t slots, double* mean) const {
    constexpr int kFew = 4;
    const int64_t plane = cut_.columns ? block.each : block.length;
    int64_t at[kFew];
    for (int i = 0; i < kFew; ++i) at[i] = i * block.count / kFew * block.stride + i * plane / kFew;
    for (int64_t j = 0; j < slots; ++j, x += plane) {
      double sum = 0;
      for (const int64_t i : at) sum += double(float(x[i]));
      mean[j] = float(sum / kFew);
    }
  }
  int64_t slots_of(const Chunk& chunk) const { return statistics_of(cut_, chunk.block); }
  int64_t count_of(const Chunk& chunk) const { return count_of(chunk.block); }
  int64_t count_of(const Block& block) const {
    return block.count * (cut_.columns ? block.each : block.length);
  }
  double* left_of(double* mean) const { return mean + 3 * size_; }
  double* mean_at(int64_t i) { return values_.get() + i * cut_.slots; }

  const Cut cut_;
  const ElementType type_;
  const char* const x_;
  const int64_t size_;
  std::unique_ptr<double[]> values_;  // written before they are read
};

// Mean, M2 and rstd of a set, from the moments of its chunks.
struct Statistics {
  const Cut cut;
  int64_t count;
  double eps, *mean, *m2, *rstd;

  void merge(MomentPartials& partials, int64_t set) const {
    const int64_t base = cut.first_statistic(set), statistics = cut.statistics_of(set);
    const MomentPartials::Merged of = partials.merge(set);
    if (of.count == count) {  // a slot is a whole statistic
      std::copy_n(of.mean, statistics, mean + base);
      std::copy_n(of.m2, statistics, m2 + base);
    } else {
      join(of, mean + base, m2 + base, statistics);
    }
    if (rstd == nullptr) return;
    for (int64_t i = base; i < base + statistics; ++i) rstd[i] = 1 / std::sqrt(m2[i] / count + eps);
  }

 private:
  // Several slots per statistic: from the mean of all, which costs no digit.
  void join(const MomentPartials::Merged& of, double* means, double* squares, int64_t statistics) const {
    std::fill_n(means, statistics, 0.0);
    std::fill_n(squares, statistics, 0.0);
    const double counts[] = {double(of.count), double(of.count + 1)};
    const double shares[] = {counts[0] / double(count), counts[1] / double(count)};
    cut.each_slot(of.slots, [&](int64_t slot, int64_t i) { means[i] += of.mean[slot] * shares[slot < of.with_tail]; });
    std::vector<double> rest(statistics);  // the rounding error of the mean
    cut.each_slot(of.slots, [&](int64_t slot, int64_t i) {
      const double difference = (of.mean[slot] - means[i]) + (of.left == nullptr ? 0.0 : of.left[slot]);
      squares[i] += of.m2[slot] + difference * difference * counts[slot < of.with_tail];
      rest[i] += difference * shares[slot < of.with_tail];
    });
    for (int64_t i = 0; i < statistics; ++i)
      if (std::isfinite(rest[i])) means[i] += rest[i];  // otherwise the mean is not a finite number already
  }
};

// Sums of dz and of dz * (x - mean) of every chunk of a set.
class GradPartials {
 public:
  explicit GradPartials(const Cut& cut)
      : cut_(cut), size_(cut.chunks * cut.slots), values_(new double[2 * size_]) {}

  void clear() { std::fill_n(values_.get(), 2 * size_, 0.0); }
  double* dz(int64_t i) { return values_.get() + i * cut_.slots; }
  double* dz_centred(int64_t i) { return dz(i) + size_; }

  // summed(channel of the set, sum_dz, sum_dz_centred) for every sum, chunk by chunk.
  template <class Summed> void merge(int64_t set, Summed summed) {
    for (int64_t i = 0; i < cut_.chunks; ++i) {
      const Chunk chunk = cut_.chunk(set, i);
      const int64_t n = statistics_of(cut_, chunk.block);
      const double *a = dz(i), *b = dz_centred(i);
      if (cut_.fold == 1) {
        for (int64_t j = 0; j < n; ++j) summed(chunk.index + j, a[j], b[j]);
      } else {
        for (int64_t j = 0; j < n; ++j) summed(j % cut_.channels(), a[j], b[j]);
      }
    }
  }

 private:
  const Cut cut_;
  const int64_t size_;
  std::unique_ptr<double[]> values_;
};

}  // namespace leannorm
