// Under a memory limit everything is kept until the process comes near the limit. Then saved values are dropped while the
// forward pass goes on. The oldest go first, since the backward pass reads them last: at first those that are cheap to
// rebuild, then products, then anything that can be rebuilt.
#pragma once

#include "freed.h"

#include <cmath>
#include <unordered_set>

#ifdef __GLIBC__
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#endif

namespace leannorm::recording {

// Bytes of this process's pages, as the system counts them; 0 if it does not. `resident` leaves out pages of files, such as
// libraries, because the system can read them again.
struct Pages {
  int64_t size = 0, resident = 0, data = 0;

  static Pages read() {
    Pages made;
#ifdef __GLIBC__
    std::FILE* const file = std::fopen("/proc/self/status", "r");
    if (file == nullptr) return made;
    char line[256];
    const auto add = [&line](const char* name, int64_t& to) {
      long kilobytes = 0;
      const size_t n = std::strlen(name);
      if (std::strncmp(line, name, n) == 0 && std::sscanf(line + n, ": %ld kB", &kilobytes) == 1) to += kilobytes * 1024;
    };
    while (std::fgets(line, sizeof line, file) != nullptr)
      add("VmSize", made.size), add("RssAnon", made.resident), add("RssShmem", made.resident), add("VmData", made.data);
    std::fclose(file);
#endif
    return made;
  }
  // What `ulimit -v` and `ulimit -d` leave.
  static int64_t room() {
    int64_t least = std::numeric_limits<int64_t>::max();
#ifdef __GLIBC__
    rlimit all, of_data;
    const bool is_limited = getrlimit(RLIMIT_AS, &all) == 0 && getrlimit(RLIMIT_DATA, &of_data) == 0 &&
                            (all.rlim_cur != RLIM_INFINITY || of_data.rlim_cur != RLIM_INFINITY);
    if (!is_limited) return least;
    const Pages now = read();
    if (all.rlim_cur != RLIM_INFINITY) least = static_cast<int64_t>(all.rlim_cur) - now.size;
    if (of_data.rlim_cur != RLIM_INFINITY) least = std::min(least, static_cast<int64_t>(of_data.rlim_cur) - now.data);
#endif
    return least;
  }
};

// Bytes of this process, as the C library counts them. It does not count tensors if the process uses another allocator.
struct InUse {
  static constexpr int kLarge = 1 << 20;
  int64_t allocated = 0, free = 0;

  static InUse now() {
    InUse made;
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
    const struct mallinfo2 info = mallinfo2();
    made.allocated = info.uordblks + info.hblkhd, made.free = info.fordblks;
#endif
    return made;
  }
  static bool is_counted() {
    static const bool does = [] {
      constexpr int64_t size = 1 << 20;
      const int64_t before = now().allocated;
      const Tensor t = at::empty({size}, at::kByte);
      return now().allocated - before >= size;
    }();
    return does;
  }
  // The bytes that the process has and has not freed; 0 if the system does not say.
  static int64_t of_process() { return is_counted() ? now().allocated + of_others() : read_resident(); }
  // The program itself, and what was not allocated by the C library. Part of what was freed may not be resident, so each
  // measurement may be too low, and the highest one is the best.
  static int64_t of_others() {
    static std::atomic<int64_t> most = 0;
    const InUse now = InUse::now();
    const int64_t seen = read_resident() - now.allocated - now.free;
    int64_t before = most.load();
    while (before < seen && !most.compare_exchange_weak(before, seen)) {}
    return std::max(before, seen);
  }
  static int64_t read_resident() { return Pages::read().resident; }
  // Returns to the system the freed memory that the C library has kept. From now on each large tensor's memory is returned
  // as soon as it is freed. Without this, freed pages between those in use can take as much memory again.
  static void trim() {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, kLarge), malloc_trim(0);
#endif
  }
};

// What later passes at the same place learn from a pass under a limit: how much its backward pass took beyond what the forward
// pass had left, in units of the largest saved tensor.
struct Learned {
  static constexpr double kAtFirst = 6, kWithin = 5;  // for what is allocated within a node, such as workspaces, which is not seen
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
      : limit_(bytes), bytes_(bytes - static_cast<int64_t>(kMargin * static_cast<double>(bytes))), learned_(std::move(learned)),
        others_(InUse::of_others()) {
    static std::atomic<bool> trimmed = false;  // `ulimit` counts pages that were never written too
    if (Pages::room() < std::numeric_limits<int64_t>::max() && !trimmed.exchange(true)) InUse::trim();
  }
  Limit(const Limit&) = delete;
  ~Limit() {  // all that the pass saved is freed
    const auto largest = static_cast<double>(largest_);
    if (read_ && largest_ > 0)
      learned_->note(static_cast<double>(most_ - end_) / largest, static_cast<double>(all_) / largest, largest / static_cast<double>(first_));
    learned_->passed = had_ > limit_ ? had_ : 0;
  }
  // The bytes that the process has now: what the C library has allocated, and the program itself.
  int64_t has() {
    const int64_t bytes = InUse::is_counted() ? InUse::now().allocated + others_ : InUse::read_resident();
    return had_ = std::max(had_, bytes), bytes;
  }
  // The bytes that the backward pass will probably take in addition.
  int64_t reserve() const {
    const double beyond = learned_->beyond.load(), largest = std::max(static_cast<double>(largest_), static_cast<double>(first_) * learned_->of_first.load());
    const double at_first = Learned::kAtFirst * static_cast<double>(largest_) + static_cast<double>(gradients_) +
                            (level_ == kLevels - 1 ? static_cast<double>(row()) : 0.0);
    return static_cast<int64_t>(beyond < 0 ? at_first : (beyond + Learned::kWithin) * largest);
  }
  // Measures by how many bytes the process will be over the limit in the backward pass. It takes half a millisecond, so that
  // between measurements what is saved is added and what is dropped subtracted.
  void look() {
    const int64_t coming = reserve();
    over_ = coming - std::min(bytes_ - has(), Pages::room());
    since_ = 0, wait_ = std::max(bytes_ / kLooks, -over_ / kFar);
    trim();
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
    since_ = 0, wait_ = bytes_ / kLooks, read_ = true, most_ = std::max(most_, has() - others_);
    trim();
  }
  void forward_ends(Log& log) {
    for (look(); over_ > 0 && drop(log); look()) {}  // what was dropped may be in use elsewhere, so that it is not freed
    missed_ = over_ > 0 ? has() + reserve() : 0;
    end_ = most_ = InUse::now().allocated, wait_ = 0;
    missed_ = std::max({missed_, had_ > limit_ ? had_ : 0, learned_->passed.load()});
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
  const int64_t others_;
  int64_t had_ = 0, gradients_ = 0, first_ = 0, largest_ = 0, all_ = 0, since_ = 0, wait_ = 0, over_ = 0, end_ = -1, most_ = 0, missed_ = 0;
  bool read_ = false;  // memory was measured during a backward pass
  std::unordered_set<const void*> parameters_;
  int level_ = 0;
  size_t next_ = 0;  // the next of the log's listed values

  // Freed pages between those in use still belong to the process.
  void trim() const {
    if (others_ < bytes_ && InUse::read_resident() > bytes_) InUse::trim();
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
