// Memory that a closed log needs and that others can write (watch.h).
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace leannorm::recording {

struct Log;

// Of one log; what `values` has does not change.
struct Exposed {
  std::weak_ptr<Log> log;
  ska::flat_hash_map<c10::StorageImpl*, int> values;
  std::atomic<int> left = 0;  // that are still needed and not copied
};
struct Watched {
  std::mutex mutex;
  std::vector<std::shared_ptr<Exposed>> all;
  std::atomic<int> left = 0;  // of all of them
};
inline Watched& watched() {
  static auto* const made = new Watched();
  return *made;
}
inline void forget(Exposed& exposed, int count) { exposed.left -= count, watched().left -= count; }

}  // namespace leannorm::recording
