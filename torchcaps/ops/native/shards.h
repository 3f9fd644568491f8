// Shards: division of the work among threads, and packing of tensors so that the parents are innermost. Included by
// worker.h.
//
// A thread has a shard: some images and some types of children. It processes its samples in blocks whose data about the
// parents fit the cache, the children in runs, and a run in chunks. The weights of a chunk's children are packed once
// for all samples of a block, and data about the parents is read once for all children of a chunk.
//
// Packed tensors consist of tiles of L parents, (tiles, features, L). The last tile is filled up.
#pragma once
#include <cstdlib>

#include "problem.h"
#include "vector.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

constexpr int CHUNK = 4;          // children of a chunk
constexpr int CHILDREN = 32;      // most children at a time that share weights: size of buffers with an entry per child
constexpr int RUN = 256;          // children of a run: long sums are sums of shorter ones, to lose fewer digits
constexpr int MOST_SAMPLES = 64;  // most samples of a block

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Scratch memory of one thread.
class Arena {
 public:
  ~Arena() {
    for (int i = 0; i < count_; i++) free(blocks_[i]);
  }
  // Returns zeros, aligned to a cache line.
  void* bytes(int64_t size) {
    size = (most(size, 1) + 63) / 64 * 64;
    void* block = count_ < MOST ? aligned_alloc(64, size) : nullptr;
    if (!block) {
      failed = true;
      return nullptr;
    }
    memset(block, 0, size);
    return blocks_[count_++] = block;
  }
  template <class X>
  X* get(int64_t count) {
    return static_cast<X*>(bytes(count * static_cast<int64_t>(sizeof(X))));
  }
  bool failed = false;

 private:
  static constexpr int MOST = 128;
  void* blocks_[MOST];
  int count_ = 0;
};

// Sizes of poses, R x D, and votes, R x H. Sizes that are not 0 are known to the compiler. SAMPLES is the number of
// samples that are processed together: weights in registers then serve up to 4 rows of poses.
template <int R, int D, int H>
struct Shape {
  static constexpr int ROWS = R, WIDTH = D, HEIGHT = H, SAMPLES = R == 0 || R >= 4 ? 1 : 4 / R;
  explicit Shape(const Problem& a) : rows_(a.rows), d_(a.d), h_(a.h) {}
  INLINE int64_t rows() const { return R ? R : rows_; }
  INLINE int64_t d() const { return D ? D : d_; }
  INLINE int64_t h() const { return H ? H : h_; }
  INLINE int64_t features() const { return rows() * h(); }
  INLINE int64_t pose() const { return rows() * d(); }
  int64_t rows_, d_, h_;
};

struct Shard {
  int number;  // index of the shard
  int64_t first_image, last_image, first_type, last_type;
};

// Division into shards: parts of the images times parts of the types, one shard for each thread.
struct Division {
  int64_t images, types;
  int count() const { return static_cast<int>(images * types); }
  Shard shard(const Problem& a, int64_t unit, int number) const {
    int64_t i = number / types, t = number % types, units = a.types / unit;
    return {number, a.images * i / images, a.images * (i + 1) / images, units * t / types * unit,
            units * (t + 1) / types * unit};
  }
};

// Packed position of a column of (parents, width): the same.
struct InOrder {
  INLINE int64_t operator()(int64_t column) const { return column; }
};

template <class T, int L, class Order = InOrder>
void pack(const T* x, int64_t parents, int64_t width, T fill, Vec<T, L>* packed, Order order = {}) {
  using V = Vec<T, L>;
  for (int64_t first = 0; first < parents; first += L, x += L * width, packed += width) {
    const int own = static_cast<int>(least(L, parents - first));
    int64_t column = 0;
    for (; column + L <= width; column += L) {
      V rows[L];
#pragma GCC unroll 16
      for (int j = 0; j < L; j++) {
        __builtin_prefetch(x + (L + j) * width + column);  // too many streams for the hardware prefetcher
        rows[j] = j < own ? read<T, L>(x + j * width + column) : splat<T, L>(fill);
      }
      transpose<T, L>(rows);
#pragma GCC unroll 16
      for (int i = 0; i < L; i++) packed[order(column + i)] = rows[i];
    }
    for (; column < width; column++) {
      V lanes = splat<T, L>(fill);
      for (int j = 0; j < own; j++) lanes[j] = x[j * width + column];
      packed[order(column)] = lanes;
    }
  }
}
// The inverse of pack. With ADD it adds to x.
template <class T, int L, bool ADD = false, class Order = InOrder>
void unpack(const Vec<T, L>* packed, int64_t parents, int64_t width, T* x, Order order = {}) {
  using V = Vec<T, L>;
  for (int64_t first = 0; first < parents; first += L, x += L * width, packed += width) {
    const int own = static_cast<int>(least(L, parents - first));
    int64_t column = 0;
    for (; column + L <= width; column += L) {
      V rows[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; i++) rows[i] = packed[order(column + i)];
      transpose<T, L>(rows);
#pragma GCC unroll 16
      for (int j = 0; j < L; j++) {
        T* out = x + j * width + column;
        __builtin_prefetch(out + L * width, 1);
        if (j < own) write<T, L>(out, ADD ? read<T, L>(out) + rows[j] : rows[j]);
      }
    }
    for (; column < width; column++) {
      const V lanes = packed[order(column)];
      for (int j = 0; j < own; j++) {
        T& out = x[j * width + column];
        out = ADD ? out + lanes[j] : lanes[j];
      }
    }
  }
}

// Rows that children share in groups of equal size: weights, biases, offsets or betas, and their gradients. Each slot
// holds one packed row, and a sum that is still to be added to its gradient. The children of a chunk have a slot each.
template <class T, int L>
class Rows {
 public:
  using V = Vec<T, L>;
  // x is (groups, kernel places, shared, d, h), where `shared` is the number of parents or 1. d is 1 except for weights.
  Rows(Arena& arena, const Problem& a, const void* x, void* grad, int64_t groups, int64_t shared, int64_t d, int64_t h,
       int slots, T fill = 0)
      : x_(static_cast<const T*>(x)), grad_(static_cast<T*>(grad)), parents_(a.parents), shared_(shared),
        width_(d * h), size_((a.parents + L - 1) / L * width_), per_group_(groups ? a.types / groups : 1),
        kernel_(a.down * a.across), slots_(slots), fill_(fill) {
    order_ = arena.get<int32_t>(width_);
    if (arena.failed) return;
    for (int64_t e = 0; e < d; e++)
      for (int64_t f = 0; f < h; f++) order_[e * h + f] = static_cast<int32_t>(f * d + e);
    V *packed = x ? arena.get<V>(slots * size_) : nullptr, *sums = grad ? arena.get<V>(slots * size_) : nullptr;
    for (int i = 0; i < slots; i++) {
      row_[i] = -1;
      packed_[i] = x ? packed + i * size_ : nullptr;
      sums_[i] = grad ? sums + i * size_ : nullptr;
    }
  }
  // Packs the row of a child, given by its type and its place in the window, into slot i.
  void load(int i, int64_t type, int64_t place) {
    if (!x_) return;
    const int64_t row = type / per_group_ * kernel_ + place;
    if (row == row_[i]) return;
    flush(i);
    row_[i] = row;
    const T* x = x_ + row * shared_ * width_;
    if (shared_ == parents_) return pack<T, L>(x, parents_, width_, fill_, packed_[i], Turned{order_});
    for (int64_t j = 0; j < parents_; j += L)  // one row for all parents
      for (int64_t f = 0; f < width_; f++) packed_[i][j / L * width_ + f] = splat<T, L>(x[f]);
  }
  void flush(int i) {
    if (!grad_ || row_[i] < 0) return;
    T* grad = grad_ + row_[i] * shared_ * width_;
    if (shared_ == parents_) {
      unpack<T, L, true>(sums_[i], parents_, width_, grad, Turned{order_});
    } else {
      for (int64_t j = 0; j < parents_; j++)
        for (int64_t f = 0; f < width_; f++) grad[f] += sums_[i][j / L * width_ + f][j % L];
    }
    memset(static_cast<void*>(sums_[i]), 0, size_ * sizeof(V));
  }
  void flush_all() {
    for (int i = 0; i < slots_; i++) flush(i);
  }
  INLINE const V* row(int i) const { return packed_[i]; }
  INLINE V* grad(int i) const { return sums_[i]; }
  explicit operator bool() const { return x_ != nullptr; }

 private:
  struct Turned {  // packed position with d innermost, and not h
    INLINE int64_t operator()(int64_t column) const { return order[column]; }
    const int32_t* order;
  };
  const T* x_;
  T* grad_;
  int64_t parents_, shared_, width_, size_, per_group_, kernel_;
  int32_t* order_;
  int slots_;
  T fill_;
  int64_t row_[CHILDREN];
  V *packed_[CHILDREN], *sums_[CHILDREN];
};

// Positions of poses in memory, in units of one pose.
struct Places {
  explicit Places(const Problem& a)
      : a(a), grid_down((a.height - a.dilation_down * (a.down - 1) - 1) / a.stride_down + 1),
        grid_across((a.width - a.dilation_across * (a.across - 1) - 1) / a.stride_across + 1),
        windows(grid_down * grid_across) {}
  int64_t of_sample(int64_t sample) const {
    const int64_t image = sample / windows, y = sample % windows / grid_across, x = sample % grid_across;
    return (image * a.types * a.height + y * a.stride_down) * a.width + x * a.stride_across;
  }
  int64_t of_child(int64_t type, int64_t place) const {
    const int64_t y = place / a.across, x = place % a.across;
    return (type * a.height + y * a.dilation_down) * a.width + x * a.dilation_across;
  }
  int64_t samples() const { return a.images * windows; }
  const Problem& a;
  int64_t grid_down, grid_across, windows;
};

// Gradients that shards add to: the tensor itself, or a copy for each other shard if they add to the same numbers.
class SharedGradients {
 public:
  // Adds a gradient of `size` numbers; x may be null. Aligned: no two shards of different types add to the same
  // number.
  template <class T>
  void add(void* x, int64_t size, bool aligned, const Division& division) {
    Part& part = parts_[count_++];
    part = {x, x ? size : 0, sizeof(T) == 8, nullptr};
    part.own = x && division.count() > 1 && (division.images > 1 || !aligned);
    if (part.own) {
      part.copies = calloc(static_cast<size_t>((division.count() - 1) * size + 1), sizeof(T));
      failed = failed || !part.copies;
    }
  }
  void* of_shard(int part, int shard) const {
    const Part& p = parts_[part];
    if (!p.own || shard == 0) return p.x;
    return static_cast<char*>(p.copies) + (shard - 1) * p.size * (p.wide ? 8 : 4);
  }
  // Sums the copies in the order of the shards; thread i of n does its part of each tensor.
  void sum(int i, int n, int shards) const {
    for (int part = 0; part < count_; part++) {
      const Part& p = parts_[part];
      if (!p.own) continue;
      const int64_t first = p.size * i / n, last = p.size * (i + 1) / n;
      for (int s = 1; s < shards; s++) p.wide ? add_to<double>(p, s, first, last) : add_to<float>(p, s, first, last);
    }
  }
  ~SharedGradients() {
    for (int i = 0; i < count_; i++) free(parts_[i].copies);
  }
  bool failed = false;

 private:
  struct Part {
    void* x = nullptr;
    int64_t size = 0;
    bool wide = false;
    void* copies = nullptr;
    bool own = false;
  };
  template <class T>
  static void add_to(const Part& p, int shard, int64_t first, int64_t last) {
    T* out = static_cast<T*>(p.x);
    const T* in = static_cast<const T*>(p.copies) + (shard - 1) * p.size;
    for (int64_t i = first; i < last; i++) out[i] += in[i];
  }
  Part parts_[8];
  int count_ = 0;
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
