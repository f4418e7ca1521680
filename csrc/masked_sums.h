// Which positions are data, and the moments of a set some of whose positions are not.
#pragma once

#include <cmath>
#include <cstring>

#include "channel_sums.h"
#include "masked.h"

namespace leannorm {

// The mask of a call: for planes an end for every sample, and the mask if the ends are not enough; for columns the
// runs of valid rows.
class Positions {
 public:
  struct Rows { int64_t begin, end; };

  Positions(const Tensor& mask, const Shape& s) : positions_(s.inner), mask_(mask) {
    STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.is_contiguous() && mask.numel() == s.n * s.inner,
                    "leannorm: the mask must be bool and contiguous, of shape (samples, positions)");
    const uint8_t* const valid = static_cast<const uint8_t*>(mask.const_data_ptr());
    if (s.columns) {
      find_rows(valid, s.n * s.inner);
      return;
    }
    ends_.resize(s.n);
    counts_.resize(s.n);
    for (int64_t i = 0; i < s.n; ++i) {
      const uint8_t* of_sample = valid + i * s.inner;
      int64_t end = s.inner, count = 0;
      while (end > 0 && !of_sample[end - 1]) --end;
      for (int64_t j = 0; j < end; ++j) count += of_sample[j] != 0;
      ends_[i] = end, counts_[i] = count;
      if (count != end) valid_ = valid;
    }
  }

  // For the planes of a chunk.
  Valid planes(int64_t sample, int64_t at, bool of_one_sample) const {
    return {ends_.data() + sample, valid_ == nullptr ? nullptr : valid_ + sample * positions_, positions_, at, of_one_sample};
  }
  // visit(begin, end, valid) for runs of rows that are all valid or all not, from the row `begin` to before `end`.
  template <class Visit> void rows(int64_t begin, int64_t end, Visit visit) const {
    auto run = std::upper_bound(rows_.begin(), rows_.end(), begin, [](int64_t at, const Rows& r) { return at < r.end; });
    for (; begin < end; ++run) {
      const int64_t from = run == rows_.end() ? end : std::min(std::max(run->begin, begin), end);
      if (from > begin) visit(begin, from, false);
      if (from == end) return;
      const int64_t to = std::min(run->end, end);
      visit(from, to, true);
      begin = to;
    }
  }
  // The number of valid positions of one sample, or of all.
  int64_t count(int64_t first_sample, int64_t samples) const {
    int64_t n = 0;
    if (!counts_.empty()) {
      for (int64_t i = first_sample; i < first_sample + samples; ++i) n += counts_[i];
    } else {
      rows(first_sample * positions_, (first_sample + samples) * positions_,
           [&](int64_t begin, int64_t end, bool valid) { n += valid ? end - begin : 0; });
    }
    return n;
  }
  // The number of valid elements of the planes of a chunk.
  int64_t count(const Block& block, const Valid& valid, int64_t sample) const {
    int64_t n = 0;
    for (int64_t p = 0; p < (valid.of_one_sample ? 1 : block.count); ++p) {
      const int64_t end = valid.end(p, block.length), all = ends_[sample + p];
      if (end == all || counts_[sample + p] == all) {
        n += end == all ? counts_[sample + p] : end;
      } else {  // a part of a plane
        const uint8_t* const mask = valid.mask + valid.first(p);
        for (int64_t i = 0; i < end; ++i) n += mask[i] != 0;
      }
    }
    return valid.of_one_sample ? n * block.count : n;
  }
  // The position of one of the first valid elements of the plane, from its start.
  int64_t some(const Valid& valid, int64_t plane, int64_t length, int64_t wanted) const {
    const int64_t end = valid.end(plane, length);
    if (valid.mask == nullptr || end == 0) return std::min(wanted, end - 1);
    const uint8_t* const mask = valid.mask + valid.first(plane);
    for (int64_t i = std::min(wanted, end - 1); i < end; ++i)
      if (mask[i] != 0) return i;
    for (int64_t i = 0; i < wanted; ++i)
      if (mask[i] != 0) return i;
    return -1;
  }

 private:
  void find_rows(const uint8_t* valid, int64_t n) {
    for (int64_t i = 0; i < n;) {
      int64_t begin = i;
      while (begin < n && valid[begin] == 0) ++begin;  // anything but 0 is true, as in a view of other bytes
      if (begin == n) return;
      const void* const next = std::memchr(valid + begin, 0, n - begin);
      i = next == nullptr ? n : static_cast<const uint8_t*>(next) - valid;
      rows_.push_back({begin, i});
    }
  }

  const int64_t positions_;
  const Tensor mask_;  // the memory behind `valid_`, if the ends are not enough
  const uint8_t* valid_ = nullptr;
  std::vector<int64_t> ends_, counts_;
  std::vector<Rows> rows_;
};

// A chunk of a set, its place among the samples and which of it is data.
struct MaskedChunk {
  Chunk chunk;
  int64_t sample;  // of its first plane
  Valid valid;     // planes
  int64_t first_row;  // columns: in the numbering of all samples
};

// The division of a call with a mask: rows of columns are not folded, planes are taken by channel.
inline Cut masked_cut(const Shape& s, int64_t groups) {
  if (!s.columns) {
    if (groups == 0) return Cut::of_planes(s.c, s.n, s.c * s.inner, s.inner, s.inner, 0);
    return Cut::of_planes(s.n * groups, s.c / groups, s.inner, s.inner, s.c / groups * s.inner, 1);
  }
  Cut cut;
  cut.columns = true;
  cut.sets = groups == 0 ? 1 : s.n;
  cut.rows = s.n * s.inner / std::max<int64_t>(1, cut.sets);
  cut.statistics = groups == 0 ? s.c : groups;
  cut.per_statistic = s.c / cut.statistics;
  cut.width = cut.stride = cut.slots = s.c;
  cut.set_stride = cut.rows * s.c;
  const int64_t fewest = std::max<int64_t>(kFewestRows, 2 * kChunk / s.c);
  const int64_t chunks = std::clamp<int64_t>((cut.rows / fewest + 3) / 4 * 4, 1, kMostChunks);
  cut.rows_per_chunk = std::max<int64_t>(1, (cut.rows + chunks - 1) / chunks);
  cut.chunks = cut.whole_chunks = (cut.rows + cut.rows_per_chunk - 1) / cut.rows_per_chunk;
  return cut;
}

inline MaskedChunk masked_chunk(const Cut& cut, const Positions& positions, int64_t groups, int64_t set, int64_t i) {
  MaskedChunk found{cut.chunk(set, i), 0, {}, 0};
  if (cut.columns) {
    found.first_row = set * cut.rows + i * cut.rows_per_chunk;
    found.chunk.block.next = 0;
    return found;
  }
  const int64_t at = cut.segments > 1 ? i % cut.segments * kChunk : 0;
  const int64_t plane = cut.segments > 1 ? i / cut.segments : i * cut.per_chunk;
  found.sample = groups == 0 ? plane : set / groups;
  if (cut.step != 0 && cut.segments == 1) found.chunk.block.count = found.chunk.block.statistics;  // planes of a group
  found.valid = positions.planes(found.sample, at, groups != 0);
  return found;
}

// As `MomentPartials`, for the valid elements of every chunk: mean, sum of squared deviations, the mean's rounding
// error, and the number of elements, for each of its slots (the columns; one for planes).
class MaskedPartials {
 public:
  MaskedPartials(const Cut& cut, const Positions& positions, int64_t groups, const Tensor& x)
      : cut_(cut), positions_(positions), groups_(groups), type_(element_type(x)), x_(data(x)),
        slots_(cut.columns ? cut.width : 1), size_(cut.chunks * slots_), values_(new double[4 * size_]),
        counts_(cut.chunks) {}

  void add(const ChannelKernels& columns, const MaskedKernels& planes, int64_t set, int64_t i) {
    const MaskedChunk of = masked_chunk(cut_, positions_, groups_, set, i);
    const char* x = x_ + of.chunk.offset * element_size(type_);
    const Block& block = of.chunk.block;
    double *mean = values_.get() + i * slots_, *m2 = mean + size_, *left = m2 + size_, *sum = left + size_;
    std::fill_n(mean, slots_, 0.0);
    std::fill_n(m2, slots_, 0.0);
    std::fill_n(left, slots_, 0.0);
    const int64_t count = counts_[i] = cut_.columns ? rows_of(of) : positions_.count(block, of.valid, of.sample);
    if (count == 0) return;
    const auto add_up = [&](bool wide, int64_t most) {  // the sums of differences from `mean`, of at most this many rows
      std::fill_n(sum, slots_, 0.0);
      std::fill_n(m2, slots_, 0.0);
      if (!cut_.columns) {
        (wide ? planes.wide_moments : planes.moments)[type_](x, block, of.valid, *mean, sum, m2);
        return;
      }
      const auto moments = (wide ? columns.wide_moments : columns.moments)[1][type_];
      int64_t left_over = most;
      positions_.rows(of.first_row, of.first_row + block.count, [&](int64_t begin, int64_t end, bool valid) {
        const int64_t rows = std::min(end - begin, left_over);
        if (!valid || rows == 0) return;
        const char* from = x + (begin - of.first_row) * block.stride * element_size(type_);
        moments(from, {rows, block.stride, block.length, 0}, mean, sum, m2);
        left_over -= rows;
      });
    };
    if (type_ != kDouble && fast(of, x, count, mean, m2, sum, add_up)) return;
    guess_one(of, x, mean);
    for (int pass = 0; pass < (type_ == kDouble ? 2 : 1); ++pass) {
      for (int64_t j = 0; j < slots_; ++j)
        if (!std::isfinite(mean[j])) mean[j] = 0;  // no difference from it is a number
      add_up(true, count);
      for (int64_t j = 0; j < slots_; ++j) {
        const double rest = sum[j] / count, rounding = add_rounded(mean[j], rest);
        if (type_ == kDouble) left[j] = rounding;
        if (std::isfinite(sum[j]) && std::isinf(m2[j])) continue;  // squares of finite values, beyond float64
        m2[j] = not_negative(m2[j] - rest * sum[j]);
      }
    }
  }

  // Mean and M2 of the set's statistics, merged from the mean of all, which costs no digit; their counts.
  void merge(int64_t set, double* mean, double* m2, int64_t* counts) const {
    const int64_t n = cut_.statistics;
    std::fill_n(mean, n, 0.0);
    std::fill_n(m2, n, 0.0);
    std::fill_n(counts, n, 0);
    std::vector<double> rest(n);
    for (int64_t i = 0; i < cut_.chunks; ++i)
      for (int64_t j = 0; j < slots_; ++j) counts[statistic(j)] += counts_[i];
    each([&](int64_t s, double n, double of_part, double, double) { mean[s] += of_part * (n / double(counts[s])); });
    each([&](int64_t s, double n, double of_part, double m2_of_part, double left) {
      const double difference = (of_part - mean[s]) + left;
      m2[s] += m2_of_part + difference * difference * n;
      rest[s] += difference * (n / double(counts[s]));
    });
    for (int64_t s = 0; s < n; ++s)
      if (std::isfinite(rest[s])) mean[s] += rest[s];  // otherwise the mean is not a finite number already
  }

 private:
  int64_t statistic(int64_t slot) const { return cut_.columns ? slot / cut_.per_statistic : 0; }
  template <class Visit> void each(Visit visit) const {
    for (int64_t i = 0; i < cut_.chunks; ++i) {
      if (counts_[i] == 0) continue;
      const double *mean = values_.get() + i * slots_, *m2 = mean + size_, *left = m2 + size_;
      for (int64_t j = 0; j < slots_; ++j) visit(statistic(j), double(counts_[i]), mean[j], m2[j], left[j]);
    }
  }
  int64_t rows_of(const MaskedChunk& of) const {
    int64_t n = 0;
    positions_.rows(of.first_row, of.first_row + of.chunk.block.count,
                    [&](int64_t begin, int64_t end, bool valid) { n += valid ? end - begin : 0; });
    return n;
  }

  // See `MomentPartials::fast`.
  template <class AddUp>
  bool fast(const MaskedChunk& of, const char* x, int64_t count, double* mean, double* m2, double* sum, AddUp add_up) const {
    const double each = 1.0 / count, least = 1e-20 * count;
    if (cut_.columns) {
      const int64_t few = std::min<int64_t>(count, 8);
      add_up(false, few);
      for (int64_t j = 0; j < slots_; ++j) mean[j] = float(sum[j] / few);
    } else {
      *mean = float(spread_mean(of, x));
    }
    for (int guess = 0; guess < 2; ++guess) {
      add_up(false, count);
      int64_t near = 0, in_range = 0, constant = 0;
      for (int64_t j = 0; j < slots_; ++j) {
        const double square = m2[j], rest = sum[j] * each, between = rest * sum[j];
        mean[j] += rest;
        m2[j] = square - between;
        const int64_t zero = int64_t(square == 0) & int64_t(sum[j] == 0);
        in_range += int64_t(square < 1e30) & int64_t(square > least);
        near += int64_t(between < 4 * (square - between));
        constant += zero;
        sum[j] = double(zero);
      }
      if (constant > 0) {
        std::vector<double> firsts(slots_);
        guess_one(of, x, firsts.data());
        for (int64_t j = 0; j < slots_; ++j)
          if (sum[j] == 1 && mean[j] == firsts[j]) ++near, ++in_range;
      }
      if (in_range != slots_) return false;
      if (near == slots_) return true;
      for (int64_t j = 0; j < slots_; ++j) mean[j] = float(mean[j]);
    }
    return false;
  }

  // The mean of a few valid values from all parts of the planes.
  double spread_mean(const MaskedChunk& of, const char* x) const {
    constexpr int kFew = 4;
    double sum = 0, n = 0;
    const Block& block = of.chunk.block;
    for (int64_t i = 0; i < kFew; ++i) {
      const int64_t plane = i * block.count / kFew, end = of.valid.end(plane, block.length);
      const int64_t at = positions_.some(of.valid, plane, block.length, i * end / kFew);
      if (at >= 0) sum += value_at(type_, x, plane * block.stride + at), ++n;
    }
    return n == 0 ? 0.0 : sum / n;
  }
  // One valid value for each slot.
  void guess_one(const MaskedChunk& of, const char* x, double* mean) const {
    const Block& block = of.chunk.block;
    std::fill_n(mean, slots_, 0.0);
    if (cut_.columns) {
      bool found = false;
      positions_.rows(of.first_row, of.first_row + block.count, [&](int64_t begin, int64_t, bool valid) {
        if (found || !valid) return;
        found = true;
        for (int64_t j = 0; j < slots_; ++j) mean[j] = value_at(type_, x, (begin - of.first_row) * block.stride + j);
      });
      return;
    }
    for (int64_t p = 0; p < block.count; ++p) {
      const int64_t at = positions_.some(of.valid, p, block.length, 0);
      if (at < 0) continue;
      *mean = value_at(type_, x, p * block.stride + at);
      return;
    }
  }

  const Cut cut_;
  const Positions& positions_;
  const int64_t groups_;
  const ElementType type_;
  const char* const x_;
  const int64_t slots_, size_;
  std::unique_ptr<double[]> values_;
  std::vector<int64_t> counts_;
};

}  // namespace leannorm
