// The memory of large tensors under a limit. The C library does not say cheaply how much freed memory it keeps, and walks over
// its whole heap to return it. The arena keeps freed pages for the next tensor, and returns them when other memory has to grow.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#ifdef __GLIBC__
#include <malloc.h>
#endif
#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#endif

namespace leannorm::recording {

// Bytes of this process's pages, as the system counts them; 0 if it does not. `resident` leaves out pages of files, such as
// libraries, because the system can read them again.
struct Pages {
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  int64_t size = 0, resident = 0, data = 0;

  static Pages read() {
    Pages made;
#ifdef __linux__
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
  // What `ulimit -v` and `ulimit -d` leave. They count pages that were never written, too.
  static int64_t room() {
    int64_t least = kNoLimit;
#ifdef __linux__
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

// Has the C library return the freed memory that it has kept, and from now on that of large blocks, such as workspaces, at once.
inline void trim_heap() {
#ifdef __GLIBC__
  constexpr int kLarge = 1 << 20;
  mallopt(M_MMAP_THRESHOLD, kLarge), malloc_trim(0);
#endif
}

#ifdef __linux__

// torch's allocator from the first limit on. While a pass is under a limit, large tensors have pages of this arena, and all that
// it has stays below the smallest limit. Otherwise tensors are torch's own again, as far as no freed pages are left to use up.
class Arena final : public at::Allocator {
 public:
  static constexpr size_t kLarge = 1 << 16;  // bytes

  static inline std::atomic<bool> is_installed = false;

  static Arena& get() {
    static auto* const arena = [] {
      auto* const made = new Arena();
      c10::SetCPUAllocator(made), is_installed = true;
      pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); }, [] { get().mutex_.unlock(); });
#ifdef __GLIBC__
      malloc_trim(0);
#endif
      return made;
    }();
    return *arena;
  }

  at::DataPtr allocate(size_t n) override {
    char* const made = n < kLarge ? nullptr : take(whole_pages(n));
    if (made == nullptr) {
      at::DataPtr of_torch = allocate_by_torch(n);
      of_torch.compare_exchange_deleter(torch_->raw_deleter(), &free_any);
      return of_torch;
    }
    c10::profiledCPUMemoryReporter().New(made, n);
    return {made, made, &free_any, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }

  // Bytes that the process has, without those that the arena has kept and could return.
  int64_t in_use() {
    const int64_t resident = Pages::read().resident;
    const std::lock_guard lock(mutex_);
    others_ = std::max<int64_t>(resident - in_tensors_ - kept_, 0);
    const int64_t used = resident - kept_;
    make_room(0);
    return used;
  }
  int64_t kept() {
    const std::lock_guard lock(mutex_);
    return kept_;
  }
  // Bytes of tensors now, from which on the most is counted, and the most since then.
  int64_t mark() {
    const std::lock_guard lock(mutex_);
    return most_ = in_tensors_;
  }
  int64_t most() {
    const std::lock_guard lock(mutex_);
    return most_;
  }
  // A pass under a limit begins or ends, with the backward pass that it saves for.
  void enter(int64_t limit) {
    const std::lock_guard lock(mutex_);
    limits_.insert(limit);
  }
  void leave(int64_t limit) {
    const std::lock_guard lock(mutex_);
    limits_.erase(limits_.find(limit));
  }

 private:
  const size_t page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  at::Allocator* const torch_ = c10::GetCPUAllocator();
  std::mutex mutex_;
  std::multiset<int64_t> limits_;
  std::map<char*, size_t> free_;  // ranges of pages; neighbours are joined
  std::unordered_map<void*, size_t> tensors_;
  int64_t in_tensors_ = 0, most_ = 0, kept_ = 0, others_ = 0;  // bytes: `kept_` of free ranges, `others_` of what is not in the arena

  size_t whole_pages(size_t n) const { return (n + page_ - 1) / page_ * page_; }
  at::DataPtr allocate_by_torch(size_t n) {
    try {
      return torch_->allocate(n);
    } catch (const c10::Error&) {  // `ulimit` counts what is kept
      if (!return_all()) throw;
      return torch_->allocate(n);
    }
  }
  char* take(size_t n) {
    const std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto one = free_.begin(); one != free_.end(); ++one)
      if (one->second >= n && (best == free_.end() || one->second < best->second)) best = one;
    char* made = nullptr;
    if (best != free_.end()) {
      made = best->first;
      const size_t rest = best->second - n;
      free_.erase(best), kept_ -= static_cast<int64_t>(n);
      if (rest > 0) free_.emplace(made + n, rest);
    } else {
      make_room(static_cast<int64_t>(n));
      if (limits_.empty()) return nullptr;
      void* const mapped = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) return nullptr;
      made = static_cast<char*>(mapped);
    }
    tensors_.emplace(made, n), in_tensors_ += static_cast<int64_t>(n), most_ = std::max(most_, in_tensors_);
    return made;
  }
  bool return_all() {  // whether there was anything to return
    const std::lock_guard lock(mutex_);
    for (const auto& [at, bytes] : free_) munmap(at, bytes);
    free_.clear();
    return std::exchange(kept_, 0) > 0;
  }
  // Returns free pages, those of the smallest ranges first, until `n` bytes more fit below the smallest limit. Without a limit
  // the process has as much as before.
  void make_room(int64_t n) {
    int64_t beyond = limits_.empty() ? n : in_tensors_ + kept_ + others_ + n - *limits_.begin();
    while (beyond > 0 && kept_ > 0) {
      const auto least = std::min_element(free_.begin(), free_.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
      const size_t bytes = std::min(least->second, whole_pages(static_cast<size_t>(beyond)));
      munmap(least->first, bytes), kept_ -= static_cast<int64_t>(bytes), beyond -= static_cast<int64_t>(bytes);
      if (const auto [at, all] = *least; free_.erase(least), all > bytes) free_.emplace(at + bytes, all - bytes);
    }
  }
  static void free_any(void* p) {
    Arena& arena = get();
    if (reinterpret_cast<uintptr_t>(p) % arena.page_ != 0 || !arena.give(static_cast<char*>(p))) arena.torch_->raw_deallocate(p);
  }
  bool give(char* p) {
    const std::lock_guard lock(mutex_);
    const auto known = tensors_.find(p);
    if (known == tensors_.end()) return false;
    const size_t n = known->second;
    c10::profiledCPUMemoryReporter().Delete(p);
    tensors_.erase(known), in_tensors_ -= static_cast<int64_t>(n);
    if (limits_.empty()) return munmap(p, n), true;
    kept_ += static_cast<int64_t>(n);
    auto at = free_.emplace(p, n).first;
    if (const auto next = std::next(at); next != free_.end() && p + n == next->first) at->second += next->second, free_.erase(next);
    if (at == free_.begin()) return true;
    if (const auto before = std::prev(at); before->first + before->second == p) before->second += at->second, free_.erase(at);
    return true;
  }
};

#else

class Arena {
 public:
  static constexpr bool is_installed = false;

  static Arena& get() {
    static Arena arena;
    return arena;
  }
  int64_t in_use() const { return 0; }  // there are no limits then
  int64_t kept() const { return 0; }
  int64_t mark() const { return 0; }
  int64_t most() const { return 0; }
  void enter(int64_t) {}
  void leave(int64_t) {}
};

#endif

// The bytes that the process has, without freed ones that the arena keeps; 0 if the system does not say.
inline int64_t bytes_in_use() { return Arena::is_installed ? Arena::get().in_use() : Pages::read().resident; }

}  // namespace leannorm::recording
