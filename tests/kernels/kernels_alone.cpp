// The per-channel kernels without torch, against plain loops in float64: for a machine that there is only a compiler
// and an emulator for. Exits with 1 where they differ. csrc/README.md says how it is built.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../csrc/channel.h"

using namespace leannorm;

namespace {

int failures = 0, checks = 0;

// Element types as the table orders them.
struct Type { const char* name; int bytes; double eps; };
const Type types[] = {{"float32", 4, 1.2e-7}, {"float64", 8, 2.3e-16}, {"bfloat16", 2, 7.9e-3}, {"float16", 2, 9.8e-4}};

double from_half(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const double v = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return h >> 15 ? -v : v;
}
double get(int type, const std::vector<char>& v, int64_t i) {
  float f;
  double d;
  uint16_t h;
  switch (type) {
    case 0: std::memcpy(&f, &v[4 * i], 4); return f;
    case 1: std::memcpy(&d, &v[8 * i], 8); return d;
    default: std::memcpy(&h, &v[2 * i], 2);
  }
  if (type == 3) return from_half(h);
  const uint32_t u = uint32_t(h) << 16;
  std::memcpy(&f, &u, 4);
  return f;
}
void set(int type, std::vector<char>& v, int64_t i, double value) {  // value: a multiple of 1/8 below 16, exact in all
  const float f = float(value);
  if (type == 0) std::memcpy(&v[4 * i], &f, 4);
  if (type == 1) std::memcpy(&v[8 * i], &value, 8);
  uint32_t u;
  std::memcpy(&u, &f, 4);
  uint16_t h = uint16_t(u >> 16);
  if (type == 3) h = f == 0 ? 0 : uint16_t((u >> 16 & 0x8000) | ((u >> 13 & 0x3ffff) - (112 << 10)));
  if (type >= 2) std::memcpy(&v[2 * i], &h, 2);
}

struct Numbers {
  int type;
  std::vector<char> bytes;
  Numbers(int type, int64_t n) : type(type), bytes(types[type].bytes * n) {
    for (int64_t i = 0; i < n; ++i) set(type, bytes, i, (std::rand() % 64 - 32) / 8.0);
  }
  double operator[](int64_t i) const { return get(type, bytes, i); }
};

void same(const std::string& what, double got, double want, double scale, double eps) {
  ++checks;
  if (!(std::fabs(got - want) <= 4 * eps * (std::fabs(want) + scale)) && ++failures < 20)
    std::printf("%s: %.9g is not %.9g\n", what.c_str(), got, want);
}

// Of element i of a block: its statistic.
template <class Statistic> void verbs(const std::string& name, int type, int columns, Block block, int64_t size,
                                      int64_t statistics, Statistic statistic) {
  const ChannelKernels& k = LEANNORM_PICK(channel_kernels);
  const Numbers x(type, size), dy(type, size), residual(type, size);
  Numbers result(type, size), dz(type, size);
  std::vector<double> mean(statistics), scale(statistics), bias(statistics), rstd(statistics), slope(statistics), shift(statistics);
  const double eps = types[type].eps, sum_eps = type == 1 ? 1e-13 : 1e-5;
  std::vector<float> singles;
  std::vector<double>* const rows[] = {&mean, &scale, &bias, &rstd, &slope, &shift};
  for (auto* row : rows)
    for (double& v : *row) v = (std::rand() % 32 + 1) / 16.0;
  std::vector<double> zero(statistics);
  const auto given = [&](std::vector<float>* f, std::vector<double>& v) -> const void* {
    f->assign(v.begin(), v.end());
    return type == 1 ? static_cast<const void*>(v.data()) : f->data();
  };
  std::vector<float> f[7];
  const Coefficients c{given(f, mean), given(f + 1, zero), given(f + 2, scale), given(f + 3, bias), given(f + 4, rstd),
                       given(f + 5, slope), given(f + 6, shift), false};
  const Operands o{x.bytes.data(), residual.bytes.data(), dy.bytes.data(), nullptr, result.bytes.data(), dz.bytes.data(), false};

  std::vector<double> count(statistics), first(statistics), second(statistics), wide(statistics), wide_second(statistics);
  std::vector<double> want_first(statistics), want_second(statistics), want_dz(statistics), want_centred(statistics);
  (type == 1 ? k.wide_moments : k.moments)[columns][type](x.bytes.data(), block, mean.data(), first.data(), second.data());
  k.wide_moments[columns][type](x.bytes.data(), block, mean.data(), wide.data(), wide_second.data());
  for (int64_t i = 0; i < size; ++i) {
    const int64_t s = statistic(i);
    const double d = x[i] - mean[s], z = d * scale[s] + bias[s] + residual[i], g = z <= 0 ? 0 : dy[i];
    count[s] += 1, want_first[s] += d, want_second[s] += d * d, want_dz[s] += g, want_centred[s] += g * d;
  }
  for (int64_t s = 0; s < statistics; ++s) {
    same(name + " moments", first[s], want_first[s], count[s], sum_eps);
    same(name + " moments", second[s], want_second[s], count[s], sum_eps);
    same(name + " wide moments", wide[s], want_first[s], count[s], 1e-13);
    same(name + " wide moments", wide_second[s], want_second[s], count[s], 1e-13);
  }
  for (const int act : {int(kIdentity), int(kRelu), int(kGelu)}) {
    k.normalize[columns][type](o, block, c, act);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t s = statistic(i);
      double z = (x[i] - mean[s]) * scale[s] + bias[s] + residual[i];
      if (act == kRelu) z = z > 0 ? z : 0;
      if (act == kGelu) z = z * 0.5 * std::erfc(-z / std::sqrt(2.0));
      same(name + " normalize", result[i], z, 1, type == 1 ? 1e-12 : eps + 1e-6);
    }
  }
  std::fill(first.begin(), first.end(), 0.0);
  std::fill(second.begin(), second.end(), 0.0);
  k.grad_sums[columns][type](o, block, c, kRelu, first.data(), second.data());
  k.input_grad[columns][type](o, block, c, kRelu);
  for (int64_t s = 0; s < statistics; ++s) {
    same(name + " gradient sums", first[s], want_dz[s], count[s], sum_eps);
    same(name + " gradient sums", second[s], want_centred[s], count[s], sum_eps);
  }
  for (int64_t i = 0; i < size; ++i) {
    const int64_t s = statistic(i);
    const double d = x[i] - mean[s], z = d * scale[s] + bias[s] + residual[i], g = z <= 0 ? 0 : dy[i];
    same(name + " dz", dz[i], g, 0, eps);
    same(name + " dx", result[i], g * scale[s] + d * rstd[s] * slope[s] + shift[s], 1, type == 1 ? 1e-12 : eps + 1e-6);
  }
}

}  // namespace

int main() {
  for (int type = 0; type < 4; ++type) {
    const std::string of = std::string(" of ") + types[type].name;
    for (const int64_t n : {1, 7, 16, 33, 300}) {
      verbs("planes" + of, type, 0, {3, 5 * n, n, 0, 0, 5}, 15 * n, 5, [n](int64_t i) { return i / n % 5; });
      verbs("columns" + of, type, 1, {37, n, n, 0}, 37 * n, n, [n](int64_t i) { return i % n; });
      if (n > 1 && n <= 256)
        verbs("short planes" + of, type, 1, {9, 70 * n, 70 * n, 0, 0, 1, n}, 630 * n, 70, [n](int64_t i) { return i / n % 70; });
    }
  }
  std::printf("%d of %d differ\n", failures, checks);
  return failures != 0;
}
