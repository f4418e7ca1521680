// Under a memory limit everything is kept until the process comes near the limit. Then saved values are dropped while the
// forward pass goes on. The oldest go first, since the backward pass reads them last: at first those that are cheap to
// rebuild, then products, then anything that can be rebuilt.
#pragma once

#include "arena.h"
#include "freed.h"

#include <cmath>
#include <unordered_set>

namespace leannorm::recording {

// What later passes at the same place learn from a pass under a limit: how much its backward pass took beyond what the forward
// pass had left, in units of the largest saved tensor.
struct Learned {
  static constexpr double kAtFirst = 6, kMargin = 2;  // `kMargin`: for longer rebuilds than before
  std::atomic<double> beyond = -1;  // -1: not known yet
  std::atomic<double> saved = 0;    // all that the last pass saved
  std::atomic<double> of_first = 0;  // the largest in units of the first tensor, from which a pass can predict it
  std::atomic<int64_t> passed = 0;  // the most bytes that the process had during the last pass, if more than the limit

  void note(double taken, double all, double largest) {
    follow(beyond, taken), follow(of_first, largest), saved.store(all);
  }

 private:
  static void follow(std::atomic<double>& known, double now) {  // rises to a larger value at once, falls to a smaller one by degrees
    const double before = known.load();
    known.store(before < now ? now : before * 0.75 + now * 0.25);
  }
};

// The limit of one pass.
class Limit {
 public:
  static constexpr double kMargin = 0.03;  // of the limit, for memory between allocations

  Limit(int64_t bytes, std::shared_ptr<Learned> learned)
      : limit_(bytes), bytes_(bytes - static_cast<int64_t>(kMargin * static_cast<double>(bytes))), learned_(std::move(learned)) {
    static std::atomic<bool> trimmed = false;
    if (Pages::room() < Pages::kNoLimit && !trimmed.exchange(true)) trim_heap();
    const int64_t left = room();
    arena_.enter(in_arena_ = left < Pages::kNoLimit ? std::min(bytes_, arena_.in_use() + left) : bytes_);
  }
  Limit(const Limit&) = delete;
  ~Limit() {  // all that the pass saved is freed
    arena_.leave(in_arena_);
    const auto largest = static_cast<double>(largest_);
    if (read_ && largest_ > 0)
      learned_->note(static_cast<double>(arena_.most() - end_) / largest, static_cast<double>(all_) / largest, largest / static_cast<double>(first_));
    learned_->passed = had_ > limit_ ? had_ : 0;
  }
  // The bytes that the process has now. If those are too many, the C library may have freed ones that are left.
  int64_t has() {
    int64_t bytes = arena_.in_use();
    if (bytes > bytes_ && trims_ > 0) --trims_, trim_heap(), bytes = arena_.in_use();
    return had_ = std::max(had_, bytes), bytes;
  }
  // The bytes that the backward pass will probably take in addition.
  int64_t expected() const {
    const double beyond = learned_->beyond.load();
    if (beyond >= 0) return static_cast<int64_t>(beyond * largest());
    return static_cast<int64_t>(Learned::kAtFirst * static_cast<double>(largest_)) + gradients_ + (level_ == kLevels - 1 ? row() : 0);
  }
  int64_t reserve() const {
    return expected() + (learned_->beyond.load() < 0 ? 0 : static_cast<int64_t>(Learned::kMargin * largest()));
  }
  // Measures by how many bytes the process will be over the limit in the backward pass. Between measurements, what is saved is
  // added and what is dropped subtracted.
  void look() {
    over_ = reserve() - std::min(bytes_ - has(), room());
    since_ = 0, wait_ = std::max(bytes_ / kLooks, -over_ / kFar);
  }

  // Counts the gradient that a parameter is going to have.
  void reads_parameter(const Tensor& t) {
    if (!t.grad().defined() && parameters_.insert(t.unsafeGetTensorImpl()).second) gradients_ += static_cast<int64_t>(t.nbytes());
  }
  // The forward pass has saved a tensor of so many bytes.
  void saved(Log& log, int64_t nbytes) {
    if (first_ == 0) first_ = nbytes;
    largest_ = std::max(largest_, nbytes), since_ += nbytes, all_ += nbytes, over_ += nbytes;
    if (since_ >= wait_) look();
    if (over_ > 0) drop(log);
  }
  // Drops values until the process should be below the limit. Returns whether any was dropped.
  bool drop(Log& log) {
    if (encode_freed(log)) look();  // first what cannot be rebuilt, such as masks
    const Policy before = log.policy;
    bool any = false;
    while (over_ > 0 && drop_one(log)) any = true;
    log.policy = before;
    return any;
  }
  // The backward pass has begun to read a tensor.
  void reads(int64_t nbytes) {
    since_ += nbytes;
    if (end_ < 0 || since_ < wait_) return;
    since_ = 0, wait_ = bytes_ / kLooks, read_ = true, has();
  }
  void forward_ends(Log& log) {
    for (look(); over_ > 0 && drop(log); look()) {}  // what was dropped may be in use elsewhere, so that it is not freed
    const int64_t least = has() + expected();
    end_ = arena_.mark(), wait_ = 0;
    missed_ = std::max({over_ > 0 && least > limit_ ? least : 0, had_ > limit_ ? had_ : 0, learned_->passed.load()});
  }
  bool is_below(int64_t bytes) const { return bytes_ < bytes; }
  int64_t missed() const { return missed_; }  // the bytes that the pass takes at least, if more than the limit

 private:
  static constexpr int kLevels = 3;       // cheap rebuilds, products, anything
  // Memory is measured again when 1/64 of the limit was saved or read. A forward pass that is far from the limit waits for a
  // quarter of the bytes up to it.
  static constexpr int64_t kLooks = 64, kFar = 4;
  const int64_t limit_, bytes_;
  const std::shared_ptr<Learned> learned_;
  Arena& arena_ = Arena::get();
  int64_t in_arena_ = 0, had_ = 0, gradients_ = 0, first_ = 0, largest_ = 0, all_ = 0, since_ = 0, wait_ = 0, over_ = 0, end_ = -1, missed_ = 0;
  bool read_ = false;  // a backward pass has read a saved tensor
  std::unordered_set<const void*> parameters_;
  int level_ = 0, trims_ = 2;  // `trims_`: so often is the heap trimmed at most, which takes milliseconds
  size_t next_ = 0;  // the next of the log's listed values

  // Bytes of the largest tensor that the pass saves, or will save if it is like the ones before.
  double largest() const { return std::max(static_cast<double>(largest_), static_cast<double>(first_) * learned_->of_first.load()); }
  // What `ulimit` leaves, and what the arena could return.
  int64_t room() const {
    const int64_t left = Pages::room();
    return left < Pages::kNoLimit ? left + arena_.kept() : left;
  }
  static Policy at_level(int level) {
    Policy policy;
    policy.products = level > 0, policy.everything = level > 1;
    if (level > 1) policy.runs = policy.sums = policy.row = 1 << 10;  // `row()` bounds them
    return policy;
  }
  // Drops the next value that can be rebuilt; false if there is none.
  bool drop_one(Log& log) {
    for (; level_ < kLevels; ++level_, next_ = 0) {
      log.policy = at_level(level_);
      while (next_ < log.listed.size()) {
        const int v = log.listed[next_];
        Value& x = log.values[v];
        if (!log.open.empty() && x.call == log.open.back()) return false;  // its call has not ended
        ++next_;
        if (x.state != Value::kHeld || x.saves == 0) continue;
        if (x.above + below(log, v) > row()) continue;
        decide(log, v);
        if (log.values[v].state != Value::kDropped) continue;
        lengthen(log, v);
        return over_ -= log.values[v].storage_bytes, true;
      }
    }
    level_ = kLevels - 1, next_ = log.listed.size();
    return false;
  }
  // The bytes that a chain of rebuilds may have in memory at once. As with checkpoints, about the square root of all is best.
  int64_t row() const {
    const auto largest = static_cast<double>(largest_);
    return static_cast<int64_t>(largest * std::max(3.0, std::sqrt(std::max(static_cast<double>(all_) / largest, learned_->saved.load()))));
  }
  // Bytes of this value and of those from which it would be rebuilt that are not kept.
  int64_t below(Log& log, int v) {
    std::vector<int> left{v};
    int64_t bytes = 0;
    ++log.stamp;
    while (!left.empty() && bytes <= row()) {
      const int one = left.back();
      left.pop_back();
      Value& x = log.values[one];
      if (std::exchange(x.seen, log.stamp) == log.stamp || (one != v && x.held.defined()) || x.is_outside()) continue;
      bytes += x.storage_bytes;
      for_inputs(log, log.calls[x.call], [&](int in) { left.push_back(in); });
    }
    return bytes;
  }
  static void lengthen(Log& log, int v) {
    std::vector<int> left{v};
    while (!left.empty()) {
      const int one = left.back();
      left.pop_back();
      const Value& x = log.values[one];
      if (x.state != Value::kDropped) continue;
      for_inputs(log, log.calls[x.call], [&](int in) {
        const int64_t above = log.values[one].above + log.values[one].storage_bytes;
        if (log.values[in].above >= above) return;
        log.values[in].above = above;
        left.push_back(in);
      });
    }
  }
};

}  // namespace leannorm::recording
