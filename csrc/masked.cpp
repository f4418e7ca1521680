// The per-channel operators with a mask: what `masked_*` of ops/backends/reference_masked.py computes.
#include "activation_name.h"
#include "caches.h"
#include "channel_coefficients.h"
#include "masked_sums.h"

namespace leannorm {
namespace {

const ChannelKernels& columns() { return LEANNORM_PICK(channel_kernels); }
const MaskedKernels& planes() { return LEANNORM_PICK(masked_kernels); }

double* doubles(const Tensor& v) { return static_cast<double*>(v.mutable_data_ptr()); }
Tensor new_doubles(const Tensor& x, const std::vector<int64_t>& sizes) {
  return new_tensor(x, sizes, ScalarType::Double);
}

// One call's tensors, its cut and its parameters.
struct Call {
  const Shape s;
  const ElementType type;
  const int64_t groups, bytes;
  const int act;
  const Cut cut;
  const Positions positions;
  const Values weight, bias;
  const char *x, *residual, *dy = nullptr, *out = nullptr;
  char *result = nullptr, *dz = nullptr;
  bool past = false;

  Call(const Tensor& x, const Tensor& mask, int64_t groups, const Optional& weight, const Optional& bias,
       const Optional& residual, int act)
      : s(x, groups), type(element_type(x)), groups(groups), bytes(element_size(type)), act(act),
        cut(masked_cut(s, groups)), positions(mask, s), weight(weight), bias(bias), x(data(x)),
        residual(data(residual)) {
    STD_TORCH_CHECK(groups >= 0, "leannorm: a mask goes with no groups of samples");
    STD_TORCH_CHECK(!this->weight.given() || this->weight.n == s.c, "leannorm: weight must have one value a channel");
    STD_TORCH_CHECK(!this->bias.given() || this->bias.n == s.c, "leannorm: bias must have one value a channel");
    if (residual.has_value()) check(x, *residual, "residual");
  }
  void check(const Tensor& x, const Tensor& other, const char* name) const {
    STD_TORCH_CHECK(other.scalar_type() == x.scalar_type() && other.numel() == x.numel() && s.same(other),
                    "leannorm: ", name, " must have the dtype, shape and layout of x");
  }
  void backward(const Tensor& grad, const Tensor& x, const Optional& output) {
    check(x, grad, "dy");
    if (output.has_value()) check(x, *output, "out");
    dy = data(grad);
    if (from_output(act)) out = data(output);
  }
  void results(const Tensor& to, const Tensor& dz_to) {
    result = mutable_data(to);
    past = to.numel() * bytes >= (cut.columns ? kStreamedColumns : kStreamedPlanes);
    if (dz_to.numel() > 0) dz = mutable_data(dz_to);
  }
  std::vector<int64_t> sizes() const {
    return groups == 0 ? std::vector<int64_t>{s.c} : std::vector<int64_t>{s.n, groups};
  }
  int64_t statistics() const { return groups == 0 ? s.c : s.n * groups; }
  int64_t blocks() const { return groups == 0 ? 1 : s.n; }  // that have gradient sums
  SetCoefficients coefficients() const { return {type, cut, s.c, weight, bias}; }
  MaskedChunk chunk(int64_t set, int64_t i) const { return masked_chunk(cut, positions, groups, set, i); }

  // Values that each statistic is of, as a tensor: of all, or of every sample.
  Tensor count(const Tensor& like) const {
    const Tensor found = groups == 0 ? new_doubles(like, {}) : new_doubles(like, {s.n, 1});
    if (groups == 0) *doubles(found) = positions.count(0, s.n);
    for (int64_t i = 0; groups > 0 && i < s.n; ++i) doubles(found)[i] = positions.count(i, 1) * (s.c / groups);
    return found;
  }

  Operands at(int64_t offset) const {
    const int64_t d = offset * bytes;
    const auto move = [d](auto p) { return p == nullptr ? p : p + d; };
    return {move(x), move(residual), move(dy), move(out), move(result), move(dz), past};
  }
  // visit(operands, block) for the runs of valid rows; the results of the others are 0.
  template <class Visit> void each_run(const MaskedChunk& of, bool writes, Visit visit) const {
    const Block& block = of.chunk.block;
    positions.rows(of.first_row, of.first_row + block.count, [&](int64_t begin, int64_t end, bool valid) {
      const int64_t rows = end - begin;
      const Operands o = at(of.chunk.offset + (begin - of.first_row) * block.stride);
      if (valid) {
        visit(o, Block{rows, block.stride, block.length, block.ahead});
      } else if (writes) {
        std::memset(o.result, 0, rows * block.stride * bytes);
        if (o.dz != nullptr) std::memset(o.dz, 0, rows * block.stride * bytes);
      }
    });
  }

  void normalize(const SetCoefficients& c, int64_t set, int64_t i) const {
    const MaskedChunk of = chunk(set, i);
    const Coefficients k = c.at(of.chunk.index);
    if (!cut.columns) return planes().normalize[type](at(of.chunk.offset), of.chunk.block, of.valid, k, act);
    each_run(of, true, [&](const Operands& o, const Block& block) { columns().normalize[1][type](o, block, k, act); });
  }
  void grad_sums(const SetCoefficients& c, GradPartials& partials, int64_t set, int64_t i) const {
    const MaskedChunk of = chunk(set, i);
    const Coefficients k = c.at(of.chunk.index);
    double *first = partials.dz(i), *second = partials.dz_centred(i);
    if (!cut.columns) {
      planes().grad_sums[type](at(of.chunk.offset), of.chunk.block, of.valid, k, act, first, second);
      return;
    }
    each_run(of, false, [&](const Operands& o, const Block& block) {
      columns().grad_sums[1][type](o, block, k, act, first, second);
    });
  }
  void input_grad(const SetCoefficients& c, int64_t set, int64_t i) const {
    const MaskedChunk of = chunk(set, i);
    const Coefficients k = c.at(of.chunk.index);
    if (!cut.columns) return planes().input_grad[type](at(of.chunk.offset), of.chunk.block, of.valid, k, act);
    each_run(of, true, [&](const Operands& o, const Block& block) { columns().input_grad[1][type](o, block, k, act); });
  }
  void merge(GradPartials& partials, int64_t set, const Values& rstd, double* sum_dz, double* sum_dz_xhat) const {
    const int64_t first = cut.first_channel(set), n = cut.channels(), statistic = cut.first_statistic(set);
    std::fill_n(sum_dz + first, n, 0.0);
    std::fill_n(sum_dz_xhat + first, n, 0.0);
    partials.merge(set, [&](int64_t channel, double dz, double dz_centred) {
      sum_dz[first + channel] += dz;
      sum_dz_xhat[first + channel] += dz_centred;
    });
    cut.each_channel(n, [&](int64_t j, int64_t i) { sum_dz_xhat[first + j] *= rstd[statistic + i]; });
  }
};

// Statistics that an operator makes or is given.
struct Given {
  const Values mean, rstd;

  Given(const Call& call, const Tensor& mean, const Tensor& rstd) : mean(mean), rstd(rstd) {
    STD_TORCH_CHECK(this->mean.n == call.statistics() && this->rstd.n == call.statistics(),
                    "leannorm: mean and rstd must have one value for each statistic");
  }
};

// The workers of `in_two_passes`.
struct Moments {
  const Call& call;
  const double eps;
  double *const mean, *const m2, *const rstd;
  MaskedPartials partials;
  int64_t set = 0;

  Moments(const Call& call, const Tensor& x, double eps, double* mean, double* m2, double* rstd)
      : call(call), eps(eps), mean(mean), m2(m2), rstd(rstd), partials(call.cut, call.positions, call.groups, x) {}
  void begin(int64_t next) { set = next; }
  void first(int64_t i) { partials.add(columns(), planes(), set, i); }
  void between() {
    const int64_t base = call.cut.first_statistic(set), n = call.cut.statistics;
    std::vector<int64_t> counts(n);
    partials.merge(set, mean + base, m2 + base, counts.data());
    if (rstd == nullptr) return;
    for (int64_t i = 0; i < n; ++i) rstd[base + i] = 1 / std::sqrt(m2[base + i] / std::max<int64_t>(counts[i], 1) + eps);
  }
  void second(int64_t) {}
};

struct GivenWorker {
  const Call& call;
  const Given& given;
  SetCoefficients coefficients;
  int64_t set = 0;

  GivenWorker(const Call& call, const Given& given) : call(call), given(given), coefficients(call.coefficients()) {}
  void begin(int64_t next) {
    set = next;
    coefficients.set_forward(set, given.mean, given.rstd);
  }
  void first(int64_t) {}
  void between() {}
  void second(int64_t) {}
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
  void first(int64_t i) { call.grad_sums(coefficients, partials, set, i); }
  void between() { call.merge(partials, set, given.rstd, sum_dz, sum_dz_xhat); }
};

std::tuple<Tensor, Tensor, Tensor> masked_moments(const Tensor& x, const Tensor& mask, int64_t groups) {
  const Call call(x, mask, groups, {}, {}, {}, kIdentity);
  const Tensor mean = new_doubles(x, call.sizes()), m2 = new_doubles(x, call.sizes());
  in_first_pass(call.cut, [&] { return Moments(call, x, 0, doubles(mean), doubles(m2), nullptr); });
  return {mean, m2, call.count(x)};
}

Tensor masked_normalize(const Tensor& x, const Tensor& mask, const Tensor& mean, const Tensor& rstd,
                        const Optional& weight, const Optional& bias, const Optional& residual, StringHandle act) {
  const int64_t groups = mean.dim() == 1 ? 0 : mean.size(1);
  Call call(x, mask, groups, weight, bias, residual, activation_index(act));
  const Tensor y = new_like(x);
  call.results(y, no_tensor(x));
  const Given given(call, mean, rstd);
  struct Normalize : GivenWorker {
    using GivenWorker::GivenWorker;
    void second(int64_t i) { call.normalize(coefficients, set, i); }
  };
  in_one_pass(call.cut, [&] { return Normalize(call, given); });
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> masked_forward(const Tensor& x, const Tensor& mask,
                                                                  const Optional& weight, const Optional& bias,
                                                                  const Optional& residual, double eps,
                                                                  StringHandle act, int64_t groups) {
  Call call(x, mask, groups, weight, bias, residual, activation_index(act));
  const Tensor y = new_like(x);
  call.results(y, no_tensor(x));
  const Tensor mean = new_doubles(x, call.sizes()), m2 = new_doubles(x, call.sizes()), rstd = new_doubles(x, call.sizes());
  const Given taken(call, mean, rstd);
  struct Forward : Moments {
    const Given& taken;
    SetCoefficients coefficients;

    Forward(const Call& call, const Tensor& x, double eps, double* mean, double* m2, double* rstd, const Given& taken)
        : Moments(call, x, eps, mean, m2, rstd), taken(taken), coefficients(call.coefficients()) {}
    void between() {
      Moments::between();
      coefficients.set_forward(set, taken.mean, taken.rstd);
    }
    void second(int64_t i) { call.normalize(coefficients, set, i); }
  };
  in_two_passes(call.cut, call.cut,
                [&] { return Forward(call, x, eps, doubles(mean), doubles(m2), doubles(rstd), taken); });
  return {y, mean, m2, rstd, call.count(x)};
}

std::tuple<Tensor, Tensor> masked_grad_sums(const Tensor& dy, const Tensor& x, const Tensor& mask, const Tensor& mean,
                                            const Tensor& rstd, const Optional& weight, const Optional& bias,
                                            const Optional& residual, const Optional& out, StringHandle act) {
  const int64_t groups = mean.dim() == 1 ? 0 : mean.size(1);
  Call call(x, mask, groups, weight, bias, residual, activation_index(act));
  call.backward(dy, x, out);
  const Given given(call, mean, rstd);
  const auto sizes = groups == 0 ? std::vector<int64_t>{call.s.c} : std::vector<int64_t>{call.s.n, call.s.c};
  const Tensor sum_dz = new_doubles(x, sizes), sum_dz_xhat = new_doubles(x, sizes);
  in_first_pass(call.cut, [&] { return GradSums(call, given, doubles(sum_dz), doubles(sum_dz_xhat)); });
  return {sum_dz, sum_dz_xhat};
}

std::tuple<Tensor, Tensor> masked_input_grad(const Tensor& dy, const Tensor& x, const Tensor& mask, const Tensor& mean,
                                             const Tensor& rstd, const Optional& weight, const Optional& bias,
                                             const Optional& residual, const Optional& out, const Optional& p,
                                             const Optional& q, StringHandle act, bool want_dz) {
  const int64_t groups = mean.dim() == 1 ? 0 : mean.size(1);
  Call call(x, mask, groups, weight, bias, residual, activation_index(act));
  call.backward(dy, x, out);
  const Given given(call, mean, rstd);
  const Tensor dx = new_like(x), dz = want_dz ? new_like(x) : no_tensor(x);
  call.results(dx, dz);
  const Values ps(p), qs(q);
  const bool constant = !ps.given() || !qs.given();  // statistics
  STD_TORCH_CHECK(constant || (ps.n == call.statistics() && qs.n == call.statistics()),
                  "leannorm: p and q must have one value for each statistic");
  struct InputGrad : GivenWorker {
    const Values &p, &q;
    const bool constant;

    InputGrad(const Call& call, const Given& given, const Values& p, const Values& q, bool constant)
        : GivenWorker(call, given), p(p), q(q), constant(constant) {}
    void begin(int64_t next) {
      GivenWorker::begin(next);
      if (!constant) coefficients.set_backward(set, given.rstd, p, q, 0);
    }
    void second(int64_t i) { call.input_grad(coefficients, set, i); }
  };
  in_one_pass(call.cut, [&] { return InputGrad(call, given, ps, qs, constant); });
  return {dx, dz};
}

// A parameter's gradient from its sums, over the samples where there are several.
Tensor gradient(const Tensor& x, const Optional& weight, double* sums, int64_t n, int64_t channels) {
  for (int64_t i = channels; i < n; ++i) sums[i % channels] += sums[i];
  const bool wide = !weight.has_value() || weight->scalar_type() == ScalarType::Double;
  const Tensor result = new_tensor(x, {channels}, wide ? ScalarType::Double : ScalarType::Float);
  if (wide) std::copy_n(sums, channels, doubles(result));
  else std::copy_n(sums, channels, static_cast<float*>(result.mutable_data_ptr()));
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> masked_backward(const Tensor& dy, const Tensor& x, const Tensor& mask,
                                                           const Tensor& mean, const Tensor& rstd, const Tensor& count,
                                                           const Optional& weight, const Optional& bias,
                                                           const Optional& residual, const Optional& out,
                                                           StringHandle act, int64_t groups, bool want_dz) {
  Call call(x, mask, groups, weight, bias, residual, activation_index(act));
  call.backward(dy, x, out);
  const Given given(call, mean, rstd);
  const Values values(count);  // of all, or of every sample
  STD_TORCH_CHECK(values.n == call.blocks(), "leannorm: count must have one value, or one a sample");
  const Tensor dx = new_like(x), dz = want_dz ? new_like(x) : no_tensor(x);
  call.results(dx, dz);
  const int64_t channels = call.s.c, sums = std::max<int64_t>(1, call.blocks()) * channels;
  std::vector<double> buffer(2 * sums);
  double *const sum_dz = buffer.data(), *const sum_dz_xhat = sum_dz + sums;
  struct Backward : GradSums {
    const Values& count;
    std::vector<double> p, q;

    Backward(const Call& call, const Given& given, double* sum_dz, double* sum_dz_xhat, const Values& count)
        : GradSums(call, given, sum_dz, sum_dz_xhat), count(count) {}
    void between() {
      GradSums::between();
      const Cut& cut = call.cut;
      const int64_t first = cut.first_channel(set), n = cut.channels();
      const double values = std::max(1.0, count[call.groups == 0 ? 0 : cut.first_channel(set) / call.s.c]);
      p.assign(cut.statistics, 0.0);
      q.assign(cut.statistics, 0.0);
      const double* const weights = coefficients.weights(set);
      cut.each_channel(n, [&](int64_t j, int64_t statistic) {
        const double scaled = weights[j] / values;
        p[statistic] += scaled * sum_dz[first + j];
        q[statistic] += scaled * sum_dz_xhat[first + j];
      });
      coefficients.set_backward(set, given.rstd, Values(p), Values(q), cut.first_statistic(set));
    }
    void second(int64_t i) { call.input_grad(coefficients, set, i); }
  };
  in_two_passes(call.cut, call.cut, [&] { return Backward(call, given, sum_dz, sum_dz_xhat, values); });
  return {dx, gradient(x, weight, sum_dz_xhat, sums, channels), gradient(x, weight, sum_dz, sums, channels), dz};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(leannorm, CPU, m) {
  m.impl("masked_moments", TORCH_BOX(&masked_moments));
  m.impl("masked_normalize", TORCH_BOX(&masked_normalize));
  m.impl("masked_forward", TORCH_BOX(&masked_forward));
  m.impl("masked_grad_sums", TORCH_BOX(&masked_grad_sums));
  m.impl("masked_input_grad", TORCH_BOX(&masked_input_grad));
  m.impl("masked_backward", TORCH_BOX(&masked_backward));
}

}  // namespace leannorm
