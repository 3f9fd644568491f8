// The loop of one thread over its samples and children, and the votes and gradients that all reductions share.
#pragma once
#include "shards.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

// The work of a thread, apart from what a reduction computes from the votes. The reduction `Self` has
//   int64_t total_size              number of vectors in the totals of one sample
//   size_of_total(a, size, tiles)   the same before there is a worker; `size` vectors hold a vote for all parents
//   state_size()                    number of vectors that `begin` packs for one sample
//   void begin(s, sample)           packs the tensors of the parents for sample s of the block
//   template <int M> void group(s)  adds the chunk's children to the run's totals, for M samples from s on
//   void merge(into, from)          adds the totals of other children
//   void finish(sample, totals)     writes the results of a sample
template <class Self, class T, int L, class S>
class Worker {
 public:
  using Number = T;
  using V = Vec<T, L>;
  static constexpr int M = S::SAMPLES, KNOWN_POSE = S::ROWS * S::WIDTH;
  static constexpr int64_t CACHE = 1 << 18;  // bytes of data about the parents of a block of samples
  static constexpr int OFFSETS = CHUNK;      // children whose offsets are kept packed

  Worker(const Problem& a, const Shard& shard, SharedGradients& shared)
      : a(a), shape(a), places(a), shard(shard), tiles((a.parents + L - 1) / L), features(shape.features()),
        size(tiles * features), pose_size(shape.pose()), kernel(a.down * a.across),
        poses(static_cast<const T*>(a.poses)), gates(static_cast<const T*>(a.gates)),
        grad_poses(static_cast<T*>(a.into_poses)), grad_gates(static_cast<T*>(a.into_gates)),
        weight(arena, a, a.weight, shared.of_shard(0, shard.number), a.groups, a.parents, shape.d(), shape.h(), CHUNK),
        bias(arena, a, a.bias, shared.of_shard(1, shard.number), a.bias_groups, a.bias_parents, 1, features, CHUNK),
        offset(arena, a, a.offset, shared.of_shard(2, shard.number), a.offset_groups, a.parents, 1, 1,
               Self::OFFSETS, -INFINITY) {
    tail = arena.get<V>(tiles);
    found = arena.get<T>(pose_size);
    for (int i = 0; i < M * CHUNK && !arena.failed; i++) votes[i] = arena.get<V>(size);
    if (arena.failed) return;
    for (int64_t j = a.parents; j < tiles * L; j++) reinterpret_cast<T*>(tail)[j] = -INFINITY;
  }

  // Processes the shard. Its totals are left in `partial` if other shards have the same samples.
  void run(Watch& watch, V* partial, int64_t state_size) {
    Self& self = static_cast<Self&>(*this);
    const int64_t total = self.total_size;
    const int64_t fitting = Self::CACHE / (sizeof(V) * (state_size + 2 * total));
    const int64_t first = shard.first_image * places.windows, last = shard.last_image * places.windows;
    block = least(last - first, most(M, least(MOST_SAMPLES, fitting / M * M)));
    of_run = arena.get<V>(block * total);
    totals = arena.get<V>(block * total);
    self.make_room();
    if (arena.failed) return watch.stop(NO_MEMORY);
    for (int64_t start = first; start < last; start += block) {
      const int64_t count = least(block, last - start);
      first_sample = start;
      memset(static_cast<void*>(totals), 0, count * total * sizeof(V));
      for (int64_t s = 0; s < count; s++) {
        sample_places[s] = places.of_sample(start + s);
        self.begin(s, start + s);
        self.clear(totals + s * total);
      }
      if (!self.children(watch, count)) return;
      for (int64_t s = 0; s < count; s++) {
        if (partial) {
          memcpy(static_cast<void*>(partial + (start - first + s) * total), totals + s * total, total * sizeof(V));
        } else {
          self.finish(start + s, totals + s * total);
        }
      }
    }
  }

  // Processes all children of the shard, for a block of `count` samples. Returns false if it was stopped.
  bool children(Watch& watch, int64_t count) {
    Self& self = static_cast<Self&>(*this);
    const int64_t total = self.total_size;
    for (int64_t i = shard.first_type * kernel, end = shard.last_type * kernel; i < end;) {
      for (int64_t s = 0; s < count; s++) {
        memset(static_cast<void*>(of_run + s * total), 0, total * sizeof(V));
        self.clear(of_run + s * total);
      }
      for (int64_t run_end = least(end, i + RUN); i < run_end; i += chunk) {
        if (watch.stopped()) return false;
        chunk = static_cast<int>(least(CHUNK, run_end - i));
        for (int c = 0; c < chunk; c++) load(c, i + c);
        int64_t s = 0;
        for (; M > 1 && s + M <= count; s += M) self.template group<M>(s);
        for (; s < count; s++) self.template group<1>(s);
      }
      self.flush();
      for (int64_t s = 0; s < count; s++) self.merge(totals + s * total, of_run + s * total);
    }
    return true;
  }

  void load(int c, int64_t child) {
    const int64_t type = child / kernel, place = child % kernel;
    index[c] = child;
    child_places[c] = places.of_child(type, place);
    weight.load(c, type, place);
    bias.load(c, type, place);
    offset.load(c, type, place);
    static_cast<Self&>(*this).load_more(c, type, place);
  }

  void load_more(int, int64_t, int64_t) {}
  void make_room() {}
  void clear(V*) {}
  void flush() {
    weight.flush_all();
    bias.flush_all();
    offset.flush_all();
  }
  void merge(V* into, const V* from) {
    for (int64_t i = 0; i < static_cast<Self&>(*this).total_size; i++) into[i] += from[i];
  }

  INLINE const T* pose(int64_t s, int c) const { return poses + (sample_places[s] + child_places[c]) * pose_size; }
  INLINE int64_t gate_index(int64_t s, int c) const { return (first_sample + s) * a.types * kernel + index[c]; }
  INLINE T gate(int64_t s, int c) const { return gates ? gates[gate_index(s, c)] : T(1); }
  INLINE const V* logit_base(int c) const { return offset ? offset.row(c) : tail; }

  // Computes the votes of child c for N samples and passes each to `seen`.
  template <int N, class Seen>
  INLINE void make_votes(int64_t s, int c, Seen& seen) {
    bias ? make_votes<N, true>(s, c, seen) : make_votes<N, false>(s, c, seen);
  }
  template <int N, bool BIASED, class Seen>
  INLINE void make_votes(int64_t s, int c, Seen& seen) {
    const int64_t R = shape.rows(), D = shape.d(), H = shape.h();
    const T* p[N];
    V* out[N];
    for (int m = 0; m < N; m++) p[m] = pose(s + m, c), out[m] = votes[m * CHUNK + c];
    const V *w = weight.row(c), *b = bias.row(c);
    for (int64_t tile = 0, f = 0; tile < tiles; tile++, f += features) {
      seen.begin(tile);
      for (int64_t h = 0; h < H; h++, w += D) {
        constexpr int KNOWN = S::WIDTH > 0 ? S::WIDTH : 1;
        V column[KNOWN];  // column of the weights, in registers
        for (int d = 0; d < KNOWN; d++) column[d] = w[d];
#pragma GCC unroll 4
        for (int m = 0; m < N; m++) {
#pragma GCC unroll 4
          for (int64_t r = 0; r < R; r++) {
            const int64_t at = f + r * H + h;
            V x = p[m][r * D] * column[0];
            if constexpr (BIASED) x += b[at];
#pragma GCC unroll 8
            for (int64_t d = 1; d < D; d++) x += p[m][r * D + d] * (d < KNOWN ? column[d] : w[d]);
            out[m][at] = x;
            seen.see(m, at, x);
          }
        }
      }
      seen.end(tile);
    }
  }

  // Computes the gradient of a pose, given that of the child's votes.
  INLINE void pose_gradient(int c, const V* grad, T* out) const {
    const V* w = weight.row(c);
    if constexpr (S::ROWS > 0) {
      constexpr int ROWS = S::ROWS, WIDTH = S::WIDTH;
      const int64_t H = shape.h();
      V sums[ROWS * WIDTH] = {};
      for (int64_t tile = 0; tile < tiles; tile++, grad += features) {
        for (int64_t h = 0; h < H; h++, w += WIDTH) {
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; r++) {
            const V x = grad[r * H + h];
#pragma GCC unroll 8
            for (int d = 0; d < WIDTH; d++) sums[r * WIDTH + d] += x * w[d];
          }
        }
      }
      join_lanes<Sum, T, L, ROWS * WIDTH>(sums, out);
    } else {
      const int64_t R = shape.rows(), D = shape.d(), H = shape.h();
      for (int64_t r = 0; r < R; r++) {
        for (int64_t d = 0; d < D; d++) {
          V sum = {};
          for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t h = 0; h < H; h++) sum += grad[tile * features + r * H + h] * w[(tile * H + h) * D + d];
          out[r * D + d] = sum_of_lanes<T, L>(sum);
        }
      }
    }
  }

  // Adds to the gradient of the weights of child c, given N poses and the gradients of their votes.
  template <int N>
  INLINE void add_weight_gradient(int c, const T* const* p, const V* const* grad) const {
    V* out = weight.grad(c);
    if (!out) return;
    const int64_t R = shape.rows(), D = shape.d(), H = shape.h();
    for (int64_t tile = 0; tile < tiles; tile++) {
      for (int64_t h = 0; h < H; h++, out += D) {
        if constexpr (S::ROWS > 0) {
          constexpr int WIDTH = S::WIDTH;
          V sums[WIDTH];
#pragma GCC unroll 8
          for (int d = 0; d < WIDTH; d++) sums[d] = out[d];
#pragma GCC unroll 4
          for (int m = 0; m < N; m++) {
#pragma GCC unroll 4
            for (int r = 0; r < S::ROWS; r++) {
              const V x = grad[m][tile * features + r * H + h];
#pragma GCC unroll 8
              for (int d = 0; d < WIDTH; d++) sums[d] += p[m][r * WIDTH + d] * x;
            }
          }
#pragma GCC unroll 8
          for (int d = 0; d < WIDTH; d++) out[d] = sums[d];
        } else {
          for (int m = 0; m < N; m++)
            for (int64_t r = 0; r < R; r++) {
              const V x = grad[m][tile * features + r * H + h];
              for (int64_t d = 0; d < D; d++) out[d] += p[m][r * D + d] * x;
            }
        }
      }
    }
  }

  // Adds to the gradients of poses, weight and bias, given the gradients of the votes of child c in place of the votes.
  template <int N>
  INLINE void add_child_gradients(int64_t s, int c) {
    const V* grad[N];
    const T* p[N];
    for (int m = 0; m < N; m++) p[m] = pose(s + m, c), grad[m] = votes[m * CHUNK + c];
    for (int m = 0; grad_poses && m < N; m++) {
      pose_gradient(c, grad[m], found);
      T* out = grad_poses + (p[m] - poses);
      for (int64_t i = 0; i < shape.pose(); i++) out[i] += found[i];
    }
    add_weight_gradient<N>(c, p, grad);
    if (V* out = bias.grad(c)) {
      for (int64_t f = 0; f < size; f++)
        for (int m = 0; m < N; m++) out[f] += grad[m][f];
    }
  }

  // Replaces logits by coefficients, the softmax over the parents, for N children at a time.
  template <int N>
  INLINE void softmax(V* const* logits, bool leaky) const {
    V folded[N];
    T largest[N], sums[N];
    for (int i = 0; i < N; i++) {
      folded[i] = logits[i][0];
      for (int64_t t = 1; t < tiles; t++) folded[i] = larger<T, L>(folded[i], logits[i][t]);
    }
    join_lanes<Largest, T, L, N>(folded, largest);
    for (int i = 0; i < N; i++) {
      if (leaky && largest[i] < 0) largest[i] = 0;
      V sum = {};
      for (int64_t t = 0; t < tiles; t++) {
        logits[i][t] = exp_of<L>(logits[i][t] - largest[i]);
        sum += logits[i][t];
      }
      folded[i] = sum;
    }
    join_lanes<Sum, T, L, N>(folded, sums);
    for (int i = 0; i < N; i++) {
      if (leaky) sums[i] += exp_of<L>(splat<T, L>(-largest[i]))[0];
      sums[i] = 1 / sums[i];
      for (int64_t t = 0; t < tiles; t++) logits[i][t] *= sums[i];
    }
  }
  // The same for the chunk's children and N samples. Only the first `chunk` of each CHUNK rows are used.
  template <int N>
  INLINE void softmax_of_chunk(V* const* logits, bool leaky) const {
    if (chunk == CHUNK) return softmax<N * CHUNK>(logits, leaky);
    for (int m = 0; m < N; m++)
      for (int c = 0; c < chunk; c++) softmax<1>(logits + m * CHUNK + c, leaky);
  }

  const Problem& a;
  const S shape;
  const Places places;
  const Shard shard;
  const int64_t tiles, features, size, pose_size, kernel;
  const T *poses, *gates;
  T *grad_poses, *grad_gates;
  Arena arena;
  Rows<T, L> weight, bias, offset;
  V* tail;  // 0 for parents, -inf for the lanes that fill up the last tile
  T* found;
  V* votes[M * CHUNK];
  V *of_run = nullptr, *totals = nullptr;
  int64_t block = 0, first_sample = 0, sample_places[MOST_SAMPLES];
  int chunk = 1;
  int64_t index[CHILDREN], child_places[CHILDREN];
};

// ---------------------------------------------------------------- what is computed from each vote

template <class V, int N>
struct Nothing {
  INLINE void begin(int64_t) {}
  INLINE void see(int, int64_t, V) {}
  INLINE void end(int64_t) {}
};

// Sums over the features of each tile, for N samples.
template <class V, int N>
struct TileSums {
  V* out[N];
  V sum[N];
  INLINE void begin(int64_t) {
    for (int m = 0; m < N; m++) sum[m] = V{};
  }
  INLINE void end(int64_t tile) {
    for (int m = 0; m < N; m++) out[m][tile] = sum[m];
  }
};

// Products of votes with vectors of the parents.
template <class V, int N>
struct Product : TileSums<V, N> {
  const V* with[N];
  INLINE void see(int m, int64_t f, V x) { this->sum[m] += x * with[m][f]; }
};

// Squared lengths of votes.
template <class V, int N>
struct Square : TileSums<V, N> {
  INLINE void see(int m, int64_t, V x) { this->sum[m] += x * x; }
};

// The logits of a Gaussian.
template <class V, int N>
struct Likelihood : TileSums<V, N> {
  const V *mean[N], *precision[N], *prior[N];
  INLINE void see(int m, int64_t f, V x) {
    const V e = x - mean[m][f];
    this->sum[m] += e * precision[m][f] * e;
  }
  INLINE void end(int64_t tile) {
    for (int m = 0; m < N; m++) this->out[m][tile] = prior[m][tile] - this->sum[m] * 0.5f;
  }
};

template <class A, class B>
struct Both {
  A first;
  B second;
  INLINE void begin(int64_t tile) { first.begin(tile), second.begin(tile); }
  template <class V>
  INLINE void see(int m, int64_t f, V x) {
    first.see(m, f, x), second.see(m, f, x);
  }
  INLINE void end(int64_t tile) { first.end(tile), second.end(tile); }
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
