// Shards: division of the work among threads, and layout of tensors in vectors. Included by worker.h.
//
// A thread has a shard: some images and some types of children. It processes its samples in blocks whose data about the
// parents fit the cache, the children in runs, and a run in chunks. The weights of a chunk's children serve all samples
// of a block, and data about the parents is read once for all children of a chunk.
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
constexpr int FEW = 8;            // samples for which weights are not packed

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t parts(int64_t a, int64_t size) { return (a + size - 1) / size; }

// A number that is known when compiling, as an argument.
template <int N>
struct Known {
  static constexpr int value = N;
};
// Calls f(Known<N>, i) for `count` items, N at a time and the rest in halves of that.
template <int N, class F>
INLINE void in_blocks(int64_t count, F f, int64_t i = 0) {
  for (; i + N <= count; i += N) f(Known<N>(), i);
  if constexpr (N > 1) in_blocks<N / 2>(count, f, i);
}

// Scratch memory of one thread.
class Arena {
 public:
  ~Arena() {
    for (int i = 0; i < count_; i++) free(blocks_[i]);
  }
  // Returns zeros, aligned to a cache line.
  void* bytes(int64_t size) {
    size = parts(most(size, 1), 64) * 64;
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

// Where the numbers of the parents stand. A vector holds P neighboring columns of G = L / P parents, its tile: with
// P = 1 the lanes lie along the parents, with P = L along the columns. Empty lanes are 0. Of the possible P the one is
// taken that promises the least time, counted in cycles as measured with AVX2: few vectors, that is few empty lanes, but
// P = 1 needs no sums over lanes, and with P = L weights need no packing.
//
// (parents, rows, h) become vectors (rows, tiles, columns), and weights (parents, d, h) become (tiles, d, columns). They
// stay as they are if P = L and h is a multiple of it; or any h for few samples, where packing would take longest: the
// last column of a row then has lanes from the next row, which votes set to 0. Fewer weights of a child than lanes are
// packed, as vectors would reach beyond those of the next child.
//
// Numbers of the parents, such as logits, fill all lanes of few vectors, the blocks: `sum_tiles` sums the lanes of each
// parent, one vector for each tile, into numbers, and `to_tiles` does the opposite. Both fix which lane a parent has.
template <class T, int L>
struct Layout {
  using V = Vec<T, L>;
  Layout(const Problem& a, int64_t samples, bool along_parents) : parents(a.parents), rows(a.rows), h(a.h) {
    constexpr double PACKED = L * sizeof(T) == 64 ? 4 : 1.5;  // cycles of a vector
    double least_time = INFINITY;
    for (int p = along_parents ? 1 : L; p >= 1; p /= 2) {
      const int64_t tiles = parts(parents, L / p), vectors = tiles * parts(h, p);
      const bool stored = p == L && (h % L == 0 || (samples < FEW && parents * a.d * h >= L));
      const double packing = stored ? 0 : PACKED * a.d / static_cast<double>(least(samples, MOST_SAMPLES));
      const double time = vectors * (rows * (0.5 * a.d + 2) + packing) + (p > 1 ? 4 * tiles : 0);
      if (time < least_time) least_time = time, P = p, as_stored = stored;
    }
    G = L / P;
    tiles = parts(parents, G);
    columns = parts(h, P);
    blocks = parts(tiles, P);
    room = blocks * P;
    row = tiles * columns;
    size = rows * row;
    weight_step = as_stored ? h : columns * L;
    weight_size = parts(tiles * a.d * weight_step + (as_stored ? L : 0), L) * L;
  }
  // Index of a parent's number.
  INLINE int64_t slot(int64_t j) const { return j / G / P * L + j % G * P + j / G % P; }

  // Sums the lanes of each parent; P is not 1. x has `room` vectors.
  INLINE void sum_tiles(const V* x, V* out) const {
    with_known<L>([&](auto p) INLINED {
      constexpr int N = decltype(p)::value;
      for (int64_t b = 0; b < blocks; b++) {
        V own[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) own[i] = x[b * N + i];
        fold<Sum, T, L, N>(own);
        out[b] = own[0];
      }
    });
  }
  // Returns vectors for the tiles whose lanes repeat the number of their parent; `out` has `room` vectors.
  INLINE const V* to_tiles(const V* x, V* out) const {
    if (P == 1) return x;
    if (P == L) {
      for (int64_t t = 0; t < tiles; t++) out[t] = splat<T, L>(reinterpret_cast<const T*>(x)[t]);
      return out;
    }
    with_known<L / 2>([&](auto p) INLINED {
      constexpr int N = decltype(p)::value;
      for (int64_t b = 0; b < blocks; b++) spread<T, L, N>(x[b], out + b * N, typename UpTo<N>::type());
    });
    for (int64_t t = tiles; t < room; t++) out[t] = V{};  // `sum_tiles` would take a NaN from there to the next sample
    return out;
  }

  // Packs what (samples, parents, rows, h) has of a sample.
  void pack(const void* x, V* out, int64_t sample = 0) const {
    move<false>(static_cast<T*>(const_cast<void*>(x)) + sample * parents * rows * h, rows, columns, row, out);
  }
  // The inverse; with ADD it adds to x.
  template <bool ADD = false>
  void unpack(const V* in, void* x, int64_t sample = 0) const {
    move<true, ADD>(static_cast<T*>(x) + sample * parents * rows * h, rows, columns, row, const_cast<V*>(in));
  }
  // The same for weights, (parents, d, h).
  void pack_weight(const T* x, int64_t d, T* out) const {
    if (as_stored) {
      memcpy(out, x, parents * d * h * sizeof(T));
    } else {
      move<false>(const_cast<T*>(x), d, d * columns, columns, reinterpret_cast<V*>(out));
    }
  }
  void add_weight(const T* in, int64_t d, T* x) const {
    for (int64_t i = 0; as_stored && i < parents * d * h; i++) x[i] += in[i];
    if (!as_stored) move<true, true>(x, d, d * columns, columns, reinterpret_cast<V*>(const_cast<T*>(in)));
  }
  // The same for a number of each parent, (samples, parents); other lanes are `fill`.
  void pack_numbers(const void* x, V* out, T fill, int64_t sample = 0) const {
    const T* own = static_cast<const T*>(x) + sample * parents;
    for (int64_t b = 0; b < blocks; b++) out[b] = splat<T, L>(fill);
    for (int64_t j = 0; j < parents; j++) reinterpret_cast<T*>(out)[slot(j)] = own[j];
  }
  void unpack_numbers(const V* in, void* x, int64_t sample = 0) const {
    T* own = static_cast<T*>(x) + sample * parents;
    for (int64_t j = 0; j < parents; j++) own[j] = reinterpret_cast<const T*>(in)[slot(j)];
  }

  int64_t parents, rows, h, P = 1, G, tiles, columns;
  int64_t blocks, room;  // vectors of a number of each parent, and for sum_tiles
  int64_t row, size;     // vectors of one row of all parents, and of all rows
  int64_t weight_step, weight_size;  // numbers from one d to the next, and of all weights of a child
  bool as_stored = false;            // whether weights are not packed

 private:
  // Calls f(Known<P>) if P is one of 2, 4, ..., MOST.
  template <int MOST, class F>
  INLINE void with_known(F f) const {
    if constexpr (MOST > 1) {
      if (P == MOST) return f(Known<MOST>());
      with_known<MOST / 2>(f);
    }
  }

  // Moves (parents, n, h) to vectors whose tiles are `tile` and whose n are `next` apart, or BACK.
  template <bool BACK, bool ADD = false>
  void move(T* x, int64_t n, int64_t tile, int64_t next, V* packed) const {
    if (P == 1 && next == h) return transposed<BACK, ADD>(x, n * h, n * h, tile, packed);
    for (int64_t i = 0; P == 1 && i < n; i++) transposed<BACK, ADD>(x + i * h, h, n * h, tile, packed + i * next);
    with_known<L>([&](auto p) { pieces<decltype(p)::value, BACK, ADD>(x, n, tile, next, packed); });
  }
  template <int N, bool BACK, bool ADD>
  void pieces(T* x, int64_t n, int64_t tile, int64_t next, V* packed) const {
    const int64_t whole = h / N, rest = h % N;
    for (int64_t j = 0; j < parents; j++)
      for (int64_t i = 0; i < n; i++, x += h) {
        V* to = packed + j / (L / N) * tile + i * next;
        const int64_t lane = j % (L / N) * N;
        for (int64_t k = 0; k < whole; k++) piece<N, BACK, ADD>(x + k * N, reinterpret_cast<T*>(to + k) + lane);
        T* last = reinterpret_cast<T*>(to + whole) + lane;
        for (int64_t k = 0; k < rest; k++) piece<1, BACK, ADD>(x + whole * N + k, last + k);
      }
  }
  template <int N, bool BACK, bool ADD>
  INLINE static void piece(T* x, T* lanes) {
    if constexpr (!BACK) {
      memcpy(lanes, x, N * sizeof(T));
    } else if constexpr (!ADD) {
      memcpy(x, lanes, N * sizeof(T));
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < N; i++) x[i] += lanes[i];
    }
  }
  // Moves `width` columns of (parents, stride) to vectors with the parents in the lanes, or back.
  template <bool BACK, bool ADD>
  void transposed(T* x, int64_t width, int64_t stride, int64_t tile, V* packed) const {
    for (int64_t first = 0; first < parents; first += L, x += L * stride, packed += tile) {
      const int own = static_cast<int>(least(L, parents - first));
      int64_t k = 0;
      for (int skip = 0; width >= L && k < width; k += L) {
        if (k + L > width) skip = static_cast<int>(k + L - width), k -= skip;  // has columns of the last block again
        V rows[L];
#pragma GCC unroll 16
        for (int j = 0; j < L; j++) {
          __builtin_prefetch(x + (L + j) * stride + k, BACK);  // too many streams for the hardware prefetcher
          rows[j] = BACK ? (ADD && j < skip ? V{} : packed[k + j]) : j < own ? read<T, L>(x + j * stride + k) : V{};
        }
        transpose<T, L>(rows);
#pragma GCC unroll 16
        for (int j = 0; j < L; j++) {
          T* out = x + j * stride + k;
          if (!BACK) packed[k + j] = rows[j];
          if (BACK && j < own) write<T, L>(out, ADD ? read<T, L>(out) + rows[j] : rows[j]);
        }
      }
      for (; k < width; k++)
        for (int j = 0; j < own; j++) piece<1, BACK, ADD>(x + j * stride + k, reinterpret_cast<T*>(packed + k) + j);
    }
  }
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

enum class Of { WEIGHT, BIAS, NUMBER };  // what a row holds: (parents, d, h), (parents, rows, h), (parents)

// Rows that children share in groups of equal size: weights, biases, offsets or betas, and their gradients. Each slot
// holds one packed row, and a sum that is still to be added to its gradient. The children of a chunk have a slot each.
// Weights that need no packing are used where they are, but for the last row of the shard if vectors read and write a
// few numbers of the next row.
template <class T, int L, Of OF>
class Rows {
 public:
  using V = Vec<T, L>;
  // x is (groups, kernel places, shared, ...), where `shared` is the number of parents or 1.
  Rows(Arena& arena, const Problem& a, const Layout<T, L>& layout, const Shard& shard, const void* x, void* grad,
       int64_t groups, int64_t shared, int slots, T fill = 0)
      : layout_(layout), x_(static_cast<const T*>(x)), grad_(static_cast<T*>(grad)), shared_(shared), d_(a.d),
        width_(OF == Of::WEIGHT ? a.d * a.h : OF == Of::BIAS ? a.rows * a.h : 1),
        size_(OF == Of::WEIGHT ? layout.weight_size : OF == Of::BIAS ? layout.size * L : layout.blocks * L),
        per_group_(groups ? a.types / groups : 1), kernel_(a.down * a.across), slots_(slots), fill_(fill),
        in_place_(OF == Of::WEIGHT && layout.as_stored),
        packed_row_(layout.h % L ? (shard.last_type - 1) / per_group_ * kernel_ + kernel_ - 1 : -1) {
    const bool packs = !in_place_ || packed_row_ >= 0;
    packed_ = x && packs ? arena.get<T>(slots * size_) : nullptr;
    sums_ = grad && packs ? arena.get<T>(slots * size_) : nullptr;
    wide_ = arena.get<T>(layout.parents * (shared == layout.parents ? 1 : width_));
    for (int i = 0; i < slots; i++) row_[i] = -1;
  }
  // Packs the row of a child, given by its type and its place in the window, into slot i.
  void load(int i, int64_t type, int64_t place) {
    if (!x_) return;
    const int64_t row = type / per_group_ * kernel_ + place;
    if (row == row_[i]) return;
    flush(i);
    row_[i] = row;
    const T* x = x_ + row * shared_ * width_;
    if (used_in_place(i)) return;
    if (shared_ != layout_.parents) {  // one row for all parents
      for (int64_t j = 0; j < layout_.parents; j++) memcpy(wide_ + j * width_, x, width_ * sizeof(T));
      x = wide_;
    }
    V* out = reinterpret_cast<V*>(packed_ + i * size_);
    if (OF == Of::WEIGHT) layout_.pack_weight(x, d_, packed_ + i * size_);
    if (OF == Of::BIAS) layout_.pack(x, out);
    if (OF == Of::NUMBER) layout_.pack_numbers(x, out, fill_);
  }
  void flush(int i) {
    if (!grad_ || row_[i] < 0 || used_in_place(i)) return;
    T *grad = grad_ + row_[i] * shared_ * width_, *own = sums_ + i * size_;
    const V* sums = reinterpret_cast<const V*>(own);
    const bool narrow = shared_ != layout_.parents;
    if (OF == Of::WEIGHT) {
      layout_.add_weight(own, d_, grad);
    } else if (OF == Of::BIAS && !narrow) {
      layout_.template unpack<true>(sums, grad);
    } else {
      if (OF == Of::BIAS) layout_.unpack(sums, wide_);
      if (OF == Of::NUMBER) layout_.unpack_numbers(sums, wide_);
      for (int64_t j = 0; j < layout_.parents; j++)
        for (int64_t f = 0; f < width_; f++) grad[narrow ? f : j * width_ + f] += wide_[j * width_ + f];
    }
    memset(own, 0, size_ * sizeof(T));
  }
  void flush_all() {
    for (int i = 0; i < slots_; i++) flush(i);
  }
  INLINE const T* numbers(int i) const {
    return used_in_place(i) ? x_ + row_[i] * shared_ * width_ : packed_ + i * size_;
  }
  INLINE T* grad_numbers(int i) const {
    return !grad_ ? nullptr : used_in_place(i) ? grad_ + row_[i] * shared_ * width_ : sums_ + i * size_;
  }
  INLINE const V* row(int i) const { return reinterpret_cast<const V*>(packed_ + i * size_); }
  INLINE V* grad(int i) const { return grad_ ? reinterpret_cast<V*>(sums_ + i * size_) : nullptr; }
  explicit operator bool() const { return x_ != nullptr; }

 private:
  INLINE bool used_in_place(int i) const { return in_place_ && row_[i] != packed_row_; }
  const Layout<T, L>& layout_;
  const T* x_;
  T *grad_, *wide_, *packed_, *sums_;
  int64_t shared_, d_, width_, size_, per_group_, kernel_;
  int slots_;
  T fill_;
  bool in_place_;
  int64_t packed_row_, row_[CHILDREN];  // the one that is packed among those in place, or -1
};

// Gradients that shards add to: the tensor itself, or a copy for each other shard if they add to the same numbers.
template <class T>
class SharedGradients {
 public:
  // Adds a gradient of `size` numbers; x may be null. Aligned: no two shards of different types add to the same
  // number.
  void add(void* x, int64_t size, bool aligned, const Division& division) {
    Part& part = parts_[count_++];
    part = {static_cast<T*>(x), nullptr, size};
    if (!x || division.count() == 1 || (division.images == 1 && aligned)) return;
    part.copies = static_cast<T*>(calloc(static_cast<size_t>((division.count() - 1) * size + 1), sizeof(T)));
    failed = failed || !part.copies;
  }
  T* of_shard(int part, int shard) const {
    const Part& p = parts_[part];
    return p.copies && shard > 0 ? p.copies + (shard - 1) * p.size : p.x;
  }
  // Sums the copies in the order of the shards; thread i of n does its part of each tensor.
  void sum(int i, int n, int shards) const {
    for (const Part& p : parts_)
      for (int s = 1; p.copies && s < shards; s++) {
        const T* in = p.copies + (s - 1) * p.size;
        for (int64_t k = p.size * i / n, end = p.size * (i + 1) / n; k < end; k++) p.x[k] += in[k];
      }
  }
  ~SharedGradients() {
    for (const Part& p : parts_) free(p.copies);
  }
  bool failed = false;

 private:
  struct Part {
    T *x = nullptr, *copies = nullptr;
    int64_t size = 0;
  };
  Part parts_[4];
  int count_ = 0;
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
