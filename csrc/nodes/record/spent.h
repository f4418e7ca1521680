// What a step under lean() took, and how much of it went into rebuilding.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

namespace leannorm::recording {

inline double clock_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// In seconds, from the first pass that opened the log to the moment when the backward pass freed the last saved tensor.
struct Spent {
  double recording = 0, rebuilding = 0;  // recording: saved tensors, and operators
  bool is_one = true;  // whether the log is that of one step

  // The times of rebuilds, and of recording, as shares of the rest of the step. None if nothing was rebuilt, if the step has not
  // ended, or if another one began before it ended.
  std::optional<std::pair<double, double>> shares() const {
    const double rest = ended_ - begun_ - recording - rebuilding;
    if (!is_one || !was_last_ || rebuilding <= 0 || rest <= 0) return {};
    return std::pair(rebuilding / rest, recording / rest);
  }
  void end() { ended_ = clock_now(), was_last_ = number_ == begun_last().load(); }

 private:
  static std::atomic<int64_t>& begun_last() {
    static std::atomic<int64_t> number{0};
    return number;
  }
  int64_t number_ = ++begun_last();
  double begun_ = clock_now(), ended_ = 0;
  bool was_last_ = false;
};

// Adds the time of a scope to one of those.
class Adding {
 public:
  explicit Adding(double* to) : to_(to), start_(to ? clock_now() : 0) {}
  Adding(const Adding&) = delete;
  ~Adding() {
    if (to_ != nullptr) *to_ += clock_now() - start_;
  }

 private:
  double* const to_;
  const double start_;
};

}  // namespace leannorm::recording
