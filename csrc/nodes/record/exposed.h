// Memory that a closed log needs and that other code can write (watch.h).
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace leannorm::recording {

struct Log;

// Such memory of one log. `values` does not change once it is filled.
struct Exposed {
  std::weak_ptr<Log> log;
  ska::flat_hash_map<c10::StorageImpl*, int> values;
  std::atomic<int> left = 0;  // values that are still needed and not copied
};
struct Watched {
  std::mutex mutex;
  std::vector<std::shared_ptr<Exposed>> all;
  std::atomic<int> left = 0;  // the sum over all logs
};
inline Watched& watched() {
  static auto* const made = new Watched();
  return *made;
}
inline void forget(Exposed& exposed, int count) { exposed.left -= count, watched().left -= count; }

}  // namespace leannorm::recording
