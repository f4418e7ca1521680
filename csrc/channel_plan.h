// How a dense tensor (N, C, *) is divided: into sets that share statistics, and each set into chunks that are summed
// separately and merged in order. The division depends on the shape only, never on the number of threads, and so do
// the results.
#pragma once

#include <algorithm>

#include "channel.h"
#include "tensors.h"

namespace leannorm {

struct Shape {
  int64_t n, c, inner;
  int columns;  // 1: channels are next to each other in memory (channels_last, or no further axes)

  // groups: 0 for statistics of the whole batch, G of each sample's G groups of channels, -B of every B samples.
  Shape(const Tensor& x, int64_t groups) : n(x.size(0)), c(x.size(1)), inner(1), columns(0) {
    STD_TORCH_CHECK(groups <= 0 || c % groups == 0, "leannorm: ", c, " channels cannot be divided into ", groups,
                    " groups");
    STD_TORCH_CHECK(groups >= 0 || n % -groups == 0, "leannorm: ", n, " samples cannot be divided into groups of ", -groups);
    for (int64_t d = 2; d < x.dim(); ++d) inner *= x.size(d);
    if (numel() == 0) return;
    const bool contiguous = x.is_contiguous();
    STD_TORCH_CHECK(contiguous || channels_last(x),
                    "leannorm: the kernels take tensors that are contiguous or channels_last");
    columns = inner == 1 || !contiguous;
  }
  int64_t numel() const { return n * c * inner; }

  // Whether `other` has the layout of this tensor.
  bool same(const Tensor& other) const {
    return numel() == 0 || (columns && inner > 1 ? channels_last(other) : other.is_contiguous());
  }

  static bool channels_last(const Tensor& x) {
    const auto size = x.sizes(), stride = x.strides();
    int64_t expected = 1;
    bool dense = true;
    const auto visit = [&](int64_t d) {
      dense = dense && (size[d] == 1 || stride[d] == expected);
      expected *= size[d];
    };
    visit(1);
    for (int64_t d = x.dim() - 1; d >= 2; --d) visit(d);
    visit(0);
    return dense;
  }
};

// One chunk: where it starts, its block, and the first channel of its set that it belongs to.
struct Chunk { int64_t offset; Block block; int64_t index; };

// At most this many elements are summed before the sums are merged.
constexpr int64_t kChunk = 16384;
// Sets larger than this are not prefetched: they would evict each other from the cache.
constexpr int64_t kAhead = 1 << 16;
// Planes of such a set are not prefetched from further away than this.
constexpr int64_t kFar = 1 << 12;
// Neighbouring channels are taken together up to kGathered elements, if that leaves kFewestSets sets. Planes up to
// kShort are columns, up to kShortOfLarge if a tensor of kLarge elements comes from memory; at least kFewestSamples
// samples are summed at once, and at least kAbreast are read abreast.
constexpr int64_t kGathered = 1 << 14, kFewestSets = 16, kShort = 128, kShortOfLarge = 256, kLarge = 1 << 20;
constexpr int64_t kFewestSamples = 32, kAbreast = 8, kLine = 16;
// Neighbouring groups of a sample, or of several, are one set up to this many elements: a set costs as much as some
// hundreds of elements.
constexpr int64_t kTogether = 1 << 12;
// For a set of up to kKept elements dz is kept between the two passes of the gradient.
constexpr int64_t kKept = 1 << 16, kPair = 32;  // the lanes of two vectors, at most
// Columns: narrower rows are folded; a matrix is divided into chunks of at least about kFewestRows rows, since
// merging a chunk costs as much as some rows, in multiples of four, so that few threads get equal shares.
constexpr int64_t kNarrow = 64, kFewestRows = 128, kMostChunks = 64;
// With no more rows than that, neighbouring columns of this many elements are a set, if that makes at least two: what
// one pass read, and the channels' coefficients, are still close for the next. Fewer columns would be too short
// pieces.
constexpr int64_t kColumns = 1 << 15;

struct Cut {
  int64_t sets = 0, chunks = 0;  // chunks of each set
  int64_t slots = 1;             // sums of a chunk, at most
  int64_t fold = 1;              // columns: rows taken as one, if there are few channels
  int64_t step = 0;              // planes: 1 if each has its own coefficients
  int64_t each = 1;              // columns that share a statistic: the elements of a short plane
  int64_t last = 0;              // planes: the statistics of a block's last set, which may be fewer
  int64_t statistics = 1;        // of each set
  int64_t per_statistic = 1;     // channels that share one
  bool columns = false;
  bool alone = false;  // one pass: none follows, or none came before, that would prefetch the next set

  // Planes of one statistic (batch norm), of a group's channels (step 1), or a group as one long plane.
  int64_t planes = 0, stride = 0, length = 0, set_stride = 0, per_chunk = 1, segments = 1;
  // Columns: `rows` rows of `width` columns, and the rest of a last row.
  int64_t rows = 0, width = 0, rows_per_chunk = 1, whole_chunks = 0, tail = 0;

  // With several blocks of samples: the sets of each, and where the next begins.
  int64_t block_sets = 1, block_stride = 0;

  int64_t start_of(int64_t set) const {
    return block_stride == 0 ? set * set_stride : set / block_sets * block_stride + set % block_sets * set_stride;
  }
  Chunk chunk(int64_t set, int64_t i) const { return columns ? column_chunk(set, i) : plane_chunk(set, i); }
  Chunk plane_chunk(int64_t set, int64_t i) const {
    const int64_t start = start_of(set);
    if (segments > 1) {
      const int64_t plane = i / segments, at = i % segments * kChunk;
      const int64_t some = std::min(length - at, kChunk);
      return {start + plane * stride + at, {1, stride, some, ahead(), next(), 1, 1, shared()}, plane * step};
    }
    const int64_t first = i * per_chunk;
    if (step != 0) {
      const int64_t count = std::min(per_chunk, channels(set) - first);
      return {start + first * stride, {1, stride, length, ahead(), next(), count, 1, shared()}, first};
    }
    const int64_t count = std::min(per_chunk, planes - first);
    return {start + first * stride, {count, stride, length, ahead(), next(), statistics_of(set), 1, shared()}, 0};
  }
  Chunk column_chunk(int64_t set, int64_t i) const {
    const int64_t start = start_of(set), first = i * rows_per_chunk;
    if (i == whole_chunks) return {start + rows * stride, {1, tail, tail, 0}, 0};
    const int64_t columns = channels(set) * each * fold;
    return {start + first * stride, {std::min(rows_per_chunk, rows - first), stride, columns, ahead(), next(), 0, each}, 0};
  }
  int64_t set_elements() const { return columns ? rows * width + tail : planes * length * (step == 0 ? statistics : 1); }
  int64_t chunk_elements() const { return set_elements() / std::max<int64_t>(1, chunks); }
  // Planes: where dz of a chunk is kept, and the space for all, in elements of whole vectors.
  int64_t kept_at(int64_t i) const {
    return segments > 1 ? i * kChunk : i * per_chunk * (step == 0 ? statistics : 1) * kept_plane();
  }
  int64_t kept_size() const {
    return columns ? 0 : segments > 1 ? chunks * kChunk : planes * (step == 0 ? statistics : 1) * kept_plane();
  }
  int64_t kept_plane() const { return (length + kPair - 1) / kPair * kPair; }
  bool shared() const { return set_elements() <= kAhead && !alone; }
  int64_t ahead() const { return set_elements() <= kAhead && sets > 1 ? set_stride : next(); }
  int64_t next() const {
    if (each != 1) return set_elements() > kAhead ? kAbreast * stride : alone ? set_stride : 0;
    return columns || (set_elements() <= kAhead && !alone) ? 0 : length <= kFar ? stride : kFar;
  }

  // The channels of each set, or of one; a set's first channel and statistic in the numbering of all samples.
  int64_t channels() const { return statistics * per_statistic; }
  int64_t channels(int64_t set) const { return statistics_of(set) * per_statistic; }
  int64_t statistics_of(int64_t set) const { return last != 0 && (set + 1) % block_sets == 0 ? last : statistics; }
  int64_t first_channel(int64_t set) const { return first_statistic(set) * per_statistic; }
  int64_t first_statistic(int64_t set) const {
    return set * statistics - (last == 0 ? 0 : set / block_sets * (statistics - last));
  }

  // visit(channel, statistic) for the first n channels of a set, without a division.
  template <class Visit> void each_channel(int64_t n, Visit visit) const {
    if (per_statistic == 1) {
      for (int64_t j = 0; j < n; ++j) visit(j, j);
    } else {
      for (int64_t j = 0, i = 0; j < n; ++i)
        for (const int64_t end = std::min(n, j + per_statistic); j < end; ++j) visit(j, i);
    }
  }

  // visit(slot, statistic) for the first n slots of a set: its channels, repeated for every row that is folded.
  template <class Visit> void each_slot(int64_t n, Visit visit) const {
    for (int64_t at = 0; at < n; at += channels())
      each_channel(std::min(channels(), n - at), [&](int64_t j, int64_t i) { visit(at + j, i); });
  }

  static Cut of_planes(int64_t sets, int64_t planes, int64_t stride, int64_t length, int64_t set_stride,
                       int64_t step) {
    Cut cut;
    cut.sets = sets, cut.planes = planes, cut.stride = stride, cut.length = length;
    cut.set_stride = set_stride, cut.step = step;
    cut.per_statistic = step == 0 ? 1 : planes;
    cut.segments = std::max<int64_t>(1, (length + kChunk - 1) / kChunk);
    cut.per_chunk = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, length));
    cut.chunks = cut.segments > 1 ? planes * cut.segments : (planes + cut.per_chunk - 1) / cut.per_chunk;
    if (planes * length == 0) cut.chunks = 0;
    cut.slots = step == 0 ? 1 : std::min(cut.per_chunk, planes);
    return cut;
  }
  // This many neighbouring channels per set, or a few more or less: fewer if there would be too few sets. The bits do
  // not depend on it.
  void gather(int64_t channels, int64_t step, int64_t elements) {
    const int64_t steps = (channels + step - 1) / step, most = std::max<int64_t>(1, steps / kFewestSets);
    const int64_t fit = kGathered / std::max<int64_t>(1, step * elements);
    statistics = slots = std::min(channels, step * std::clamp<int64_t>(fit, 1, most));
    sets = block_sets = channels == 0 ? 0 : (channels + statistics - 1) / statistics;
    last = channels - (sets - 1) * statistics;
    set_stride *= statistics;
  }
  // Every sample's groups, each of this many planes of `length` elements, next to each other; short ones several to a
  // set.
  static Cut of_groups(int64_t samples, int64_t groups, int64_t planes, int64_t length, int64_t step) {
    const int64_t group = planes * length, sample = groups * group;
    Cut cut = of_planes(samples * groups, planes, length, length, group, step);
    const int64_t fit = kTogether / std::max<int64_t>(1, group);
    if (fit < 2 || cut.chunks == 0 || samples == 0) return cut;
    // a block: all samples, of which a set has some whole ones, or one sample
    const int64_t blocks = fit < groups ? samples : 1, of_block = samples * groups / blocks;
    const int64_t most = fit < groups ? fit : fit / groups * groups;
    cut.block_sets = (of_block + most - 1) / most;
    cut.statistics = fit < groups ? (groups + cut.block_sets - 1) / cut.block_sets : std::min(most, of_block);
    cut.block_sets = (of_block + cut.statistics - 1) / cut.statistics;
    cut.last = of_block - (cut.block_sets - 1) * cut.statistics;
    cut.sets = blocks * cut.block_sets;
    cut.set_stride = cut.statistics * group;
    cut.block_stride = of_block * group;
    if (step != 0) cut.planes *= cut.statistics;
    cut.slots = step == 0 ? cut.statistics : cut.planes;
    return cut;
  }
  // Batch norm: planes of `length` elements.
  static Cut of_batch(int64_t samples, int64_t channels, int64_t length) {
    const int64_t sample = channels * length;
    Cut cut = of_planes(channels, samples, sample, length, length, 0);
    const bool is_short = length <= (samples * sample < kLarge ? kShort : kShortOfLarge);
    if (!is_short || sample < kNarrow || samples == 0) {
      if (cut.segments == 1) cut.gather(channels, 1, samples * length);
      return cut;
    }
    cut.columns = true;
    int64_t step = kLine;  // after this many planes one begins at a cache line again
    while (step > 1 && step / 2 * length % kLine == 0) step /= 2;
    cut.gather(channels, step, samples * length);
    cut.each = length, cut.rows = samples, cut.width = cut.set_stride;
    const int64_t chunks = std::max(samples * length / kChunk, kMostChunks * step / channels);
    cut.whole_chunks = std::clamp<int64_t>(chunks, 1, std::max<int64_t>(1, samples / kFewestSamples));
    cut.rows_per_chunk = (samples + cut.whole_chunks - 1) / cut.whole_chunks;
    cut.chunks = cut.whole_chunks = (samples + cut.rows_per_chunk - 1) / cut.rows_per_chunk;
    return cut;
  }
  // `samples` matrices of rows x channels.
  static Cut of_columns(int64_t samples, int64_t rows, int64_t channels, int64_t groups) {
    Cut cut;
    cut.columns = true;
    cut.sets = samples;
    cut.statistics = groups == 0 ? channels : groups;
    cut.per_statistic = channels / cut.statistics;
    cut.fold = std::max<int64_t>(1, std::min(rows, kNarrow / channels));
    cut.width = cut.stride = channels * cut.fold;
    cut.rows = rows / cut.fold;
    cut.tail = rows % cut.fold * channels;
    cut.set_stride = rows * channels;
    if (groups == 0 && rows <= kFewestRows && cut.fold == 1 && rows * channels >= 2 * kColumns) {
      cut.statistics = cut.slots = cut.width = cut.set_stride = kColumns / rows / kLine * kLine;
      cut.sets = cut.block_sets = (channels + cut.width - 1) / cut.width;
      cut.last = channels - (cut.sets - 1) * cut.width;
      cut.rows_per_chunk = rows;
      cut.chunks = cut.whole_chunks = 1;
      return cut;
    }
    const int64_t fewest = std::max<int64_t>(kFewestRows, 2 * kChunk / cut.width);
    const int64_t chunks = std::clamp<int64_t>((cut.rows / fewest + 3) / 4 * 4, 1, kMostChunks);
    cut.rows_per_chunk = std::max<int64_t>(1, (cut.rows + chunks - 1) / chunks);
    cut.whole_chunks = (cut.rows + cut.rows_per_chunk - 1) / cut.rows_per_chunk;
    cut.chunks = cut.whole_chunks + (cut.tail > 0);
    cut.slots = cut.width;
    return cut;
  }
};

// The division into channels, which normalizing and the gradient sums use.
inline Cut channel_cut(const Shape& s, int64_t groups) {
  if (groups < 0) {  // every block of samples as a batch
    Shape block = s;
    block.n = -groups;
    Cut cut = channel_cut(block, 0);
    cut.block_sets = cut.sets;
    cut.block_stride = block.numel();
    cut.sets *= s.n / block.n;
    return cut;
  }
  if (s.columns)
    return groups == 0 ? Cut::of_columns(1, s.n * s.inner, s.c, 0) : Cut::of_columns(s.n, s.inner, s.c, groups);
  if (groups == 0) return Cut::of_batch(s.n, s.c, s.inner);
  return Cut::of_groups(s.n, groups, s.c / groups, s.inner, 1);
}
// The division into statistics: the moments of a contiguous group are those of one long plane.
inline Cut moments_cut(const Shape& s, int64_t groups) {
  if (s.columns || groups <= 0) return channel_cut(s, groups);
  return Cut::of_groups(s.n, groups, 1, s.c / groups * s.inner, 0);
}

// How many pieces of work of this many elements each thread should have at least.
constexpr int64_t kGrain = 32768;
inline int64_t grain(int64_t elements) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements)); }

// Whether there are enough sets, or each is one piece, so that one thread takes a set through both passes.
inline bool carries_whole_sets(const Cut& first, const Cut& second) {
  return first.sets >= 4 * int64_t(torch::stable::get_num_threads()) || first.sets * first.set_elements() <= kGrain ||
         std::max(first.chunks, second.chunks) <= 1;
}

// A worker has the state of one set: begin(set), then first(i) for every chunk, between() once they are done,
// second(i) for every chunk after that, last chunks first since those are still in the cache. A set that one thread
// takes through both passes is in its cache, and so is its state.
template <class Make> void in_two_passes(const Cut& first_cut, const Cut& second_cut, Make make) {
  const int64_t sets = first_cut.sets, set_size = first_cut.set_elements();
  if (carries_whole_sets(first_cut, second_cut)) {
    torch::stable::parallel_for(0, sets, grain(set_size), [&](int64_t begin, int64_t end) {
      auto worker = make();
      for (int64_t set = begin; set < end; ++set) {
        worker.begin(set);
        for (int64_t i = 0; i < first_cut.chunks; ++i) worker.first(i);
        worker.between();
        for (int64_t i = second_cut.chunks; i-- > 0;) worker.second(i);
      }
    });
    return;
  }
  std::vector<decltype(make())> workers;
  workers.reserve(sets);
  for (int64_t set = 0; set < sets; ++set) {
    workers.push_back(make());
    workers.back().begin(set);
  }
  const int64_t first = first_cut.chunks, second = second_cut.chunks;
  torch::stable::parallel_for(0, sets * first, grain(first_cut.chunk_elements()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) workers[i / first].first(i % first);
  });
  for (auto& worker : workers) worker.between();
  torch::stable::parallel_for(0, sets * second, grain(second_cut.chunk_elements()), [&](int64_t begin, int64_t end) {
    for (int64_t i = end; i-- > begin;) workers[i / second].second(i % second);
  });
}

// second(i) alone, or first(i) and between().
template <class Make> void in_one_pass(const Cut& cut, Make make) {
  Cut nothing = cut;
  nothing.chunks = 0;
  in_two_passes(nothing, cut, make);
}
template <class Make> void in_first_pass(const Cut& cut, Make make) {
  Cut nothing = cut;
  nothing.chunks = 0;
  in_two_passes(cut, nothing, make);
}

}  // namespace leannorm
