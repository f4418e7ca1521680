// A call of a per-channel operator: its tensors, its division into sets, and the workers that go over them.
#pragma once

#include <memory>
#include <optional>

#include "activation_name.h"
#include "caches.h"
#include "channel_coefficients.h"
#include "masked_sums.h"

namespace leannorm {

inline const ChannelKernels& kernels() { return LEANNORM_PICK(channel_kernels); }
inline const MaskedKernels& masked_kernels_of_planes() { return LEANNORM_PICK(masked_kernels); }

inline std::vector<int64_t> statistics_sizes(const Shape& s, int64_t groups) {
  if (groups == 0) return {s.c};
  return groups > 0 ? std::vector<int64_t>{s.n, groups} : std::vector<int64_t>{s.n / -groups, s.c};
}
inline int64_t groups_of(const Tensor& statistics, const Tensor& x) {
  if (statistics.dim() == 1) return 0;
  const int64_t sets = statistics.size(0);
  return sets == x.size(0) || sets == 0 ? statistics.size(1) : -(x.size(0) / sets);
}
inline Tensor new_doubles(const Tensor& x, const std::vector<int64_t>& sizes) {
  return new_tensor(x, sizes, ScalarType::Double);
}
inline double* doubles(const Tensor& v) { return static_cast<double*>(v.mutable_data_ptr()); }

inline void check(const Shape& s, const Tensor& x, const Tensor& other, const char* name) {
  STD_TORCH_CHECK(other.scalar_type() == x.scalar_type() && other.numel() == x.numel() && s.same(other),
                  "leannorm: ", name, " must have the dtype, shape and layout of x");
}
inline void check(const Shape& s, const Tensor& x, const Optional& other, const char* name) {
  if (other.has_value()) check(s, x, *other, name);
}

struct Tensors {
  const char *x, *residual, *dy, *out;
  char *result, *dz;
  int64_t bytes;
  bool past = false;

  Operands at(int64_t offset) const {
    const int64_t d = offset * bytes;
    const auto move = [d](auto p) { return p == nullptr ? p : p + d; };
    return {move(x), move(residual), move(dy), move(out), move(result), move(dz), past};
  }
};

inline int64_t count_of(const Shape& s, int64_t groups) {
  return groups > 0 ? s.c / groups * s.inner : (groups == 0 ? s.n : -groups) * s.inner;
}

// One call's tensors, division and parameters, which all operators need.
struct Call {
  const Shape s;
  const ElementType type;
  const int64_t groups, count;  // count: elements of a statistic, including those that are not data
  const int act;
  Cut cut;
  std::optional<Positions> positions;  // which positions are data, if there is a mask
  const Values weight, bias;
  Tensors tensors;
  bool constant = false;  // no gradient goes through the statistics

  Call(const Tensor& x, const Optional& mask, int64_t groups, const Optional& weight, const Optional& bias,
       const Optional& residual, int act)
      : s(x, groups), type(element_type(x)), groups(groups), count(std::max<int64_t>(count_of(s, groups), 1)),
        act(act), cut(mask ? masked_cut(s, groups) : channel_cut(s, groups)), weight(weight), bias(bias),
        tensors{data(x), data(residual), nullptr, nullptr, nullptr, nullptr, element_size(type)} {
    STD_TORCH_CHECK(!this->weight.given() || this->weight.n == s.c, "leannorm: weight must have one value a channel");
    STD_TORCH_CHECK(!this->bias.given() || this->bias.n == s.c, "leannorm: bias must have one value a channel");
    STD_TORCH_CHECK((!weight || weight->dim() == 1) && (!bias || bias->dim() == 1),
                    "leannorm: weight and bias must have one axis");
    check(s, x, residual, "residual");
    STD_TORCH_CHECK(!mask || groups >= 0, "leannorm: a mask cannot be combined with groups of samples");
    if (mask) positions.emplace(*mask, s);
  }
  void backward(const Tensor& dy, const Tensor& x, const Optional& out) {
    check(s, x, dy, "dy");
    check(s, x, out, "out");
    tensors.dy = data(dy);
    if (from_output(act)) tensors.out = data(out);
  }
  // dx, which may overwrite x; dz if there is one.
  void results(const Tensor& result, const Tensor* dz = nullptr) {
    tensors.result = mutable_data(result);
    const int64_t least = cut.columns ? kStreamedColumns : kStreamedPlanes;
    tensors.past = result.numel() * tensors.bytes >= least && tensors.result != tensors.x;
    if (dz != nullptr) tensors.dz = mutable_data(*dz);
  }
  int64_t statistics() const { return groups > 0 ? s.n * groups : blocks() * s.c; }
  int64_t blocks() const { return groups == 0 ? 1 : groups > 0 ? s.n : s.n / -groups; }  // that have gradient sums
  SetCoefficients coefficients() const { return {type, cut, s.c, weight, bias}; }
  // The number of valid values behind each statistic, as a tensor: of all, or of every sample; none without a mask.
  Tensor valid_count(const Tensor& like) const {
    if (!positions) return Tensor();
    const Tensor found = groups == 0 ? new_doubles(like, {}) : new_doubles(like, {s.n, 1});
    if (groups == 0) *doubles(found) = positions->count(0, s.n);
    for (int64_t i = 0; groups > 0 && i < s.n; ++i) doubles(found)[i] = positions->count(i, 1) * (s.c / groups);
    return found;
  }

  void normalize(const SetCoefficients& c, int64_t set, int64_t i) const {
    each_block(set, i, true, nullptr, [&](const Operands& o, const Block& block, int64_t index, const Valid* valid) {
      if (valid) masked_kernels_of_planes().normalize[type](o, block, *valid, c.at(index), act);
      else kernels().normalize[cut.columns][type](o, block, c.at(index), act);
    });
  }
  void grad_sums(const SetCoefficients& c, GradPartials& partials, int64_t set, int64_t i, void* kept) const {
    double *const dz = partials.dz(i), *const centred = partials.dz_centred(i);
    each_block(set, i, false, kept, [&](const Operands& o, const Block& block, int64_t index, const Valid* valid) {
      if (valid) masked_kernels_of_planes().grad_sums[type](o, block, *valid, c.at(index), act, dz, centred);
      else kernels().grad_sums[cut.columns][type](o, block, c.at(index), act, dz, centred);
    });
  }
  void input_grad(const SetCoefficients& c, int64_t set, int64_t i, void* kept) const {
    each_block(set, i, true, kept, [&](const Operands& o, const Block& block, int64_t index, const Valid* valid) {
      if (valid) masked_kernels_of_planes().input_grad[type](o, block, *valid, c.at(index), act);
      else kernels().input_grad[cut.columns][type](o, block, c.at(index), act);
    });
  }
  // Whether the activation's derivative is so expensive that its values for a set are kept between the passes.
  bool keeps() const {
    const bool dear = type != kDouble && act != kIdentity && act != kRelu && !positions;
    return dear && cut.kept_size() <= kKept && cut.kept_size() > 0;
  }
  // Kept in the result, if that and what is read of the current sets are likely to be in the last cache.
  bool keeps_in_result() const {
    const int64_t sets = std::min<int64_t>(cut.sets, carries_whole_sets(cut, cut) ? torch::stable::get_num_threads() : cut.sets);
    const bool dear = type == kFloat && act != kIdentity && !from_output(act) && !positions;
    return cut.columns && dear && tensors.result != tensors.x &&
           3 * sets * cut.set_elements() * tensors.bytes <= last_cache().bytes;
  }
  // The gradient sums of a set, by channel (and by sample, if the statistics are).
  void merge(GradPartials& partials, int64_t set, const Values& rstd, double* sum_dz, double* sum_dz_xhat) const {
    const int64_t first = cut.first_channel(set), n = cut.channels(set), statistic = cut.first_statistic(set);
    std::fill_n(sum_dz + first, n, 0.0);
    std::fill_n(sum_dz_xhat + first, n, 0.0);
    partials.merge(set, [&](int64_t channel, double dz, double dz_centred) {
      sum_dz[first + channel] += dz;
      sum_dz_xhat[first + channel] += dz_centred;
    });
    cut.each_channel(n, [&](int64_t j, int64_t i) { sum_dz_xhat[first + j] *= rstd[statistic + i]; });
  }

 private:
  // visit(operands, block, index, valid) for the chunk; with a mask, columns go by runs of valid rows, and the
  // results of the others are 0; `valid` is for planes.
  template <class Visit> void each_block(int64_t set, int64_t i, bool writes, void* kept, Visit visit) const {
    if (!positions) {
      const Chunk chunk = cut.chunk(set, i);
      Operands o = tensors.at(chunk.offset);
      o.kept = kept;
      visit(o, chunk.block, chunk.index, nullptr);
      return;
    }
    const MaskedChunk of = masked_chunk(cut, *positions, groups, set, i);
    const Block& block = of.chunk.block;
    if (!cut.columns) {
      visit(tensors.at(of.chunk.offset), block, of.chunk.index, &of.valid);
      return;
    }
    positions->rows(of.first_row, of.first_row + block.count, [&](int64_t begin, int64_t end, bool valid) {
      const int64_t rows = end - begin;
      const Operands o = tensors.at(of.chunk.offset + (begin - of.first_row) * block.stride);
      if (valid) {
        visit(o, Block{rows, block.stride, block.length, block.ahead}, of.chunk.index, nullptr);
      } else if (writes) {
        std::memset(o.result, 0, rows * block.stride * tensors.bytes);
        if (o.dz != nullptr) std::memset(o.dz, 0, rows * block.stride * tensors.bytes);
      }
    });
  }
};

// The statistics of an operator's arguments.
struct Given {
  const Values mean, rstd;

  Given(const Call& call, const Tensor& mean, const Tensor& rstd) : mean(mean), rstd(rstd) {
    STD_TORCH_CHECK(this->mean.n == call.statistics() && this->rstd.n == call.statistics(),
                    "leannorm: mean and rstd must have one value for each statistic");
  }
};

// A worker (see `in_two_passes`) that only does something in the passes that it defines.
struct Worker {
  const Call& call;
  int64_t set = 0;

  explicit Worker(const Call& call) : call(call) {}
  void begin(int64_t next) { set = next; }
  void first(int64_t) {}
  void between() {}
  void second(int64_t) {}
};

struct Moments : Worker {
  const Statistics& statistics;
  MomentPartials partials;

  Moments(const Call& call, const Statistics& statistics, const Tensor& x)
      : Worker(call), statistics(statistics), partials(statistics.cut, x) {}
  void first(int64_t i) { partials.add(kernels(), set, i); }
  void between() { statistics.merge(partials, set); }
};

// Over the valid values.
struct MaskedMoments : Worker {
  const Statistics& statistics;
  MaskedPartials partials;

  MaskedMoments(const Call& call, const Statistics& statistics, const Tensor& x)
      : Worker(call), statistics(statistics), partials(call.cut, *call.positions, call.groups, x) {}
  void first(int64_t i) { partials.add(kernels(), masked_kernels_of_planes(), set, i); }
  void between() {
    const int64_t base = call.cut.first_statistic(set), n = call.cut.statistics;
    std::vector<int64_t> counts(n);
    double *const mean = statistics.mean + base, *const m2 = statistics.m2 + base;
    partials.merge(set, mean, m2, counts.data());
    for (int64_t i = 0; statistics.rstd != nullptr && i < n; ++i)
      statistics.rstd[base + i] = 1 / std::sqrt(m2[i] / std::max<int64_t>(counts[i], 1) + statistics.eps);
  }
};

struct GivenWorker : Worker {
  const Given& given;
  SetCoefficients coefficients;

  GivenWorker(const Call& call, const Given& given) : Worker(call), given(given), coefficients(call.coefficients()) {}
  void begin(int64_t next) {
    Worker::begin(next);
    coefficients.set_forward(set, given.mean, given.rstd);
  }
};

struct GradSums : GivenWorker {
  double *const sum_dz, *const sum_dz_xhat;
  GradPartials partials;

  GradSums(const Call& call, const Given& given, double* sum_dz, double* sum_dz_xhat)
      : GivenWorker(call, given), sum_dz(sum_dz), sum_dz_xhat(sum_dz_xhat), partials(call.cut) {}
  void begin(int64_t next) {
    GivenWorker::begin(next);
    partials.clear();
  }
  void first(int64_t i) { call.grad_sums(coefficients, partials, set, i, nullptr); }
  void between() { call.merge(partials, set, given.rstd, sum_dz, sum_dz_xhat); }
};

}  // namespace leannorm
