// The last cache: from LEANNORM_CACHE, otherwise from Linux, otherwise from the processor. Not from `sysconf`, which
// adds up the last caches of a whole socket if its cores have several.
#include "caches.h"

#include <dirent.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace leannorm {
namespace {

// The first word of a file; empty if there is none.
std::string word(const std::string& path) {
  char found[4096] = "";
  if (FILE* file = std::fopen(path.c_str(), "r")) {
    if (std::fscanf(file, "%4095s", found) != 1) found[0] = 0;
    std::fclose(file);
  }
  return found;
}

// "32768K"
int64_t bytes_of(const std::string& size) {
  char unit = 0;
  long long count = 0;
  std::sscanf(size.c_str(), "%lld%c", &count, &unit);
  return count << (unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0);
}

// "0-7,64-71"
std::set<int> numbers(const std::string& list) {
  std::set<int> found;
  const char* at = list.c_str();
  for (int first, last, length; std::sscanf(at, "%d%n", &first, &length) == 1; at += *at == ',') {
    at += length, last = first;
    if (std::sscanf(at, "-%d%n", &last, &length) == 1) at += length;
    for (; first <= last; ++first) found.insert(first);
  }
  return found;
}

struct Level {
  int level;
  LastCache cache;
};
// Chooses among a machine's last caches. One of the highest level counts, since no work is done on a core without it. If
// they differ, the smallest counts, since threads share the work evenly.
bool stands_for_both(const Level& a, const Level& b) {
  return a.level != b.level ? a.level > b.level : a.cache.bytes < b.cache.bytes;
}

LastCache in_sysfs(const std::string& processors) {
  Level found{};
  std::set<int> seen;
  DIR* const folder = opendir(processors.c_str());
  while (const dirent* entry = folder == nullptr ? nullptr : readdir(folder)) {
    int cpu, length = 0;
    if (std::sscanf(entry->d_name, "cpu%d%n", &cpu, &length) != 1 || entry->d_name[length] != 0) continue;
    if (seen.count(cpu) != 0) continue;
    Level last{};
    std::set<int> sharing;
    for (int index = 0;; ++index) {
      const std::string at = processors + "/" + entry->d_name + "/cache/index" + std::to_string(index) + "/";
      const int level = std::atoi(word(at + "level").c_str());
      if (level == 0) break;
      if (level <= last.level || word(at + "type") == "Instruction") continue;
      sharing = numbers(word(at + "shared_cpu_list"));
      last = {level, {bytes_of(word(at + "size")), std::max<int64_t>(1, sharing.size()), "sysfs"}};
    }
    seen.insert(sharing.begin(), sharing.end());
    if (last.cache.bytes > 0 && (found.level == 0 || stands_for_both(last, found))) found = last;
  }
  if (folder != nullptr) closedir(folder);
  return found.cache;
}

LastCache in_cpuid() {
  Level found{};
#if defined(__x86_64__)
  unsigned a, b, c, d;
  const bool topology = __get_cpuid(0x80000001, &a, &b, &c, &d) && (c >> 22 & 1);  // AMD's, in the form of Intel's
  const unsigned leaf = topology ? 0x8000001d : 4;
  for (unsigned index = 0; index < 16 && __get_cpuid_count(leaf, index, &a, &b, &c, &d); ++index) {
    const int type = a & 31, level = a >> 5 & 7;
    if (type == 0) break;
    if (type == 2 || level <= found.level) continue;  // 2: instructions
    const int64_t bytes = ((b >> 22) + 1LL) * ((b >> 12 & 1023) + 1) * ((b & 4095) + 1) * (c + 1LL);
    found = {level, {bytes, (a >> 14 & 4095) + 1, "cpuid"}};
  }
#endif
  return found.cache;
}

LastCache asked(const char* processors) {
  const LastCache found = in_sysfs(processors);
  return found.bytes > 0 ? found : in_cpuid();
}

}  // namespace

const LastCache& last_cache() {
  static const LastCache found = [] {
    // In bytes, so that a test can have either result.
    if (const char* bytes = std::getenv("LEANNORM_CACHE")) return LastCache{std::atoll(bytes), 0, "LEANNORM_CACHE"};
    return asked("/sys/devices/system/cpu");
  }();
  return found;
}

int64_t streamed_traffic() {
  static const int64_t traffic = std::max<int64_t>(last_cache().bytes / 6, 16 << 20);
  return traffic;
}

// For Python: bytes and processors of the last cache that the kernels use, or of the machine that a folder describes.
// Returns where the numbers came from, null if nowhere.
extern "C" __attribute__((visibility("default"))) const char* leannorm_last_cache(const char* processors,
                                                                                  int64_t* found) {
  const LastCache cache = processors == nullptr ? last_cache() : asked(processors);
  found[0] = cache.bytes, found[1] = cache.processors;
  return cache.source;
}

}  // namespace leannorm
