// Parameters that have lines, each for a group of consecutive rows, and the sums over each group's rows.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "rows.h"
#include "tensors.h"

namespace leannorm {

constexpr int64_t kGrain = 32768;  // elements that are worth a thread
inline int64_t grain(int64_t elements_each) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(elements_each, 1)); }

// A parameter or statistic, contiguous and of the given type.
inline Tensor plain(const Tensor& v, ScalarType type) {
  if (v.scalar_type() == type && v.is_contiguous()) return v;
  const auto size = v.sizes();
  Tensor copy = new_tensor(v, {size.begin(), size.end()}, type);
  torch::stable::copy_(copy, v);
  return copy;
}

// A parameter of `rows` rows of x: `kept` values for all of them, or lines (groups, kept), each for as many consecutive
// rows. Lines have the compute type, or if every row has one the type of x, and any step between them.
class Parameter {
 public:
  Parameter(const Optional& v, const Tensor& x, int64_t rows, int64_t kept, const char* what) {
    if (!v) return;
    const ScalarType wide = compute_type(x);
    if (v->numel() == kept) {
      held_ = plain(*v, wide);
      lines_.p = data(*held_);
      return;
    }
    const auto size = v->sizes(), stride = v->strides();
    STD_TORCH_CHECK(v->dim() == 2 && size[1] == kept && size[0] > 0 && rows % size[0] == 0 && (kept == 1 || stride[1] == 1),
                    "leannorm: ", what, " must have ", kept, " values, or contiguous lines of them for groups of ", rows,
                    " rows, got ", v->numel());
    const bool narrow = v->scalar_type() != wide;
    groups_ = size[0], each_ = rows / groups_;
    STD_TORCH_CHECK(!narrow || (v->scalar_type() == x.scalar_type() && each_ == 1), "leannorm: lines of ", what, " have the wrong dtype");
    bytes_ = stride[0] * static_cast<int64_t>(v->element_size());
    lines_ = {data(*v), each_ == 1 ? stride[0] : 0, narrow};
  }

  int64_t groups() const { return groups_; }
  bool has_lines() const { return groups_ > 1; }
  bool own() const { return each_ == 1; }  // a line for every row
  // The lines of the rows from `row` to `stop`.
  Lines of(int64_t row) const {
    if (!has_lines() || own()) return lines_;
    return {static_cast<const char*>(lines_.p) + row / each_ * bytes_, 0, false};
  }
  int64_t stop(int64_t row, int64_t end) const {
    return has_lines() && !own() ? std::min(end, (row / each_ + 1) * each_) : end;
  }

 private:
  Optional held_;
  Lines lines_{};
  int64_t groups_ = 1, each_ = std::numeric_limits<int64_t>::max(), bytes_ = 0;  // bytes from a group's line to the next
};

// Sums over each group of `units` rows or panels, whose sums are `vectors` lines of `kept` values in `to`. Pieces of
// `length` units, whose number depends on the shape only, are summed separately, then added in order.
struct GroupSums {
  int64_t units, kept, groups, length, vectors;
  std::array<char*, 2> to;
  ScalarType type;
  bool own;  // every unit has a line of its own, which the body writes

  using Pointers = std::array<char*, 2>;
  // body(begin, end, lines) adds the units' share to zeros. `elements`: of all units.
  template <class Body> void add_up(const Tensor& x, int64_t elements, Body body) const {
    const int64_t sets = vectors == 0 || own ? 1 : groups, each = units / sets, pieces = (each + length - 1) / length;
    const int64_t shared = vectors == 0 || own || pieces == 1 ? 0 : sets * pieces;
    const Tensor shares = new_tensor(x, {shared, vectors, kept}, type);
    const int64_t bytes = kept * static_cast<int64_t>(shares.element_size());
    char* const share = mutable_data(shares);
    torch::stable::parallel_for(0, sets * pieces, grain(elements / (sets * pieces)), [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const int64_t group = at / pieces, first = group * each + at % pieces * length;
        Pointers line = own ? to : Pointers{};
        for (int64_t v = 0; v < vectors && !own; ++v) {
          line[v] = shared > 0 ? share + (at * vectors + v) * bytes : to[v] + group * bytes;
          std::fill_n(line[v], bytes, 0);
        }
        body(first, std::min(first + length, (group + 1) * each), line);
      }
    });
    if (shared == 0) return;
    const auto sum = LEANNORM_PICK(row_kernels).sum[type == ScalarType::Double];
    torch::stable::parallel_for(0, kept, grain(shared * vectors), [&](int64_t begin, int64_t end) {
      for (int64_t group = 0; group < groups; ++group)
        for (int64_t v = 0; v < vectors; ++v)
          sum(share + (group * pieces * vectors + v) * bytes, pieces, vectors * kept, begin, end, to[v] + group * bytes);
    });
  }
};

}  // namespace leannorm
