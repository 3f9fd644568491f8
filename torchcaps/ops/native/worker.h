// The loop of one thread over its samples and children, and the votes and gradients that all reductions share.
#pragma once
#include "shards.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

// ---------------------------------------------------------------- products of poses and weights

// The votes of a child for some samples are a product of matrices, (samples x rows, d) x (d, parents x h). Here are the
// product and its gradients, for some *lines*: the rows of the poses of these samples, and the rows of their votes.
// Weights are (tiles, d, columns). A block of weights, or of their gradient, stays in registers for all lines: 4 d and 4
// columns where there are 32 registers, or 2 columns. Deep poses would have to read and write their votes for every 4 d
// too often: there the votes of 4 lines stay in registers, and not the weights.
template <class T, int L>
struct Product {
  using V = Vec<T, L>;
  static constexpr bool MANY = L * sizeof(T) == 64;  // registers
  static constexpr int LINES = 4, DEEP = 4, COLUMNS = MANY ? 4 : 2, SHALLOW = MANY ? 16 : 4;

  Product(Arena& arena, const Layout<T, L>& at, int64_t d)
      : at(at), d(d), step(at.weight_step) {
    start = arena.get<int64_t>(at.row);
    if (at.as_stored && at.h % L != 0) real = arena.get<V>(at.row);
    for (int64_t k = 0; !arena.failed && k < at.row; k++) {
      start[k] = k / at.columns * d * step + k % at.columns * L;
      for (int64_t i = 0; real && i < least(L, at.h - k % at.columns * L); i++) real[k][i] = 1;
    }
  }

  // Weights of N d from e on, or all d if N is 0, where nothing is kept, and of C columns from k on.
  template <int N, int C>
  struct Block {
    INLINE Block(const Product& own, const T* weight, int64_t e, int64_t k, int64_t lines)
        : own(own), k(k), depth(N ? N : own.d) {
      for (int j = 0; j < C; j++) column[j] = const_cast<T*>(weight) + own.start[k + j] + e * own.step;
      if (lines < LINES) own.template fetch_ahead<C>(column, depth);
#pragma GCC unroll 16
      for (int j = 0; j < N * C; j++) kept[j] = stored(j / C, j % C);
    }
    INLINE V stored(int64_t f, int j) const { return read<T, L>(column[j] + f * own.step); }
    INLINE V real(int64_t f, int j, V x) const {  // not 0 times an infinite pose
      return own.real[k + j] > T(0) ? x : stored(f, j);
    }
    INLINE void store(int64_t f, int j, V x) {
      if (own.real && own.at.columns > 1) x = real(f, j, x);
      write<T, L>(column[j] + f * own.step, x);
    }
    INLINE V get(int64_t f, int j) const { return N ? kept[f * C + j] : stored(f, j); }
    INLINE void put(int64_t f, int j, V x) { N ? void(kept[f * C + j] = x) : store(f, j, x); }
    INLINE void store_kept() {
      constexpr int n = N ? N : 1;
      // To read what was just written takes long, so where a row is one vector all are read first. Empty lanes then write
      // the start of the next row as it was; below, rows follow in the order of memory, so that the next one replaces it.
      if (own.real && own.at.columns == 1) {
#pragma GCC unroll 16
        for (int j = 0; j < N * C; j++) kept[j] = real(j / C, j % C, kept[j]);
      }
#pragma GCC unroll 16
      for (int j = 0; j < N * C; j++) store(j % n, j / n, kept[j % n * C + j / n]);
    }
    const Product& own;
    const int64_t k, depth;
    T* column[C];
    V kept[N ? N * C : 1];
  };

  // out[i][k] = sum_d poses[i][d] weight[d][k]; with `adds` it adds to `out`. The sum of a block is added as a whole: a long
  // sum is then rounded once for each child.
  void votes(int64_t lines, const T* const* poses, const T* weight, bool adds, V* out) const {
    for_blocks(d > SHALLOW, [&](auto n, auto c, int64_t e, int64_t k) INLINED {
      constexpr int N = decltype(n)::value, C = decltype(c)::value;
      const Block<N, C> block(*this, weight, e, k, lines);
      in_blocks<N ? 1 : LINES>(lines, [&](auto m, int64_t i) INLINED {
        constexpr int M = decltype(m)::value;
        const T* p[M];
        for (int j = 0; j < M; j++) p[j] = poses[i + j] + e;
        V x[M * C] = {};
#pragma GCC unroll 4
        for (int64_t f = 0; f < block.depth; f++) {
          V w[C];
#pragma GCC unroll 4
          for (int j = 0; j < C; j++) w[j] = block.get(f, j);
#pragma GCC unroll 16
          for (int j = 0; j < M * C; j++) x[j] += p[j / C][f] * w[j % C];
        }
#pragma GCC unroll 16
        for (int j = 0; j < M * C; j++) {
          V* vote = out + (i + j / C) * at.row + k + j % C;
          if (real) x[j] = real[k + j % C] > T(0) ? x[j] : V{};
          *vote = adds || e ? *vote + x[j] : x[j];
        }
      });
    });
  }

  // out[i][d] = sum_k grads[i][k] weight[d][k]
  void of_poses(int64_t lines, const V* grads, const T* weight, T* out) const {
    in_blocks<LINES>(lines, [&](auto n, int64_t i) INLINED {
      constexpr int N = decltype(n)::value;
      const V* g[N];
      for (int m = 0; m < N; m++) g[m] = grads + (i + m) * at.row;
      in_blocks<COLUMNS>(d, [&](auto c, int64_t e) INLINED {
        constexpr int C = decltype(c)::value;
        V x[N * C] = {};
        const T* w = weight + e * step;
        for (int64_t t = 0, k = 0; t < at.tiles; t++, w += d * step - at.columns * L)
          for (const int64_t end = k + at.columns; k < end; k++, w += L) {
            V own[C];
#pragma GCC unroll 8
            for (int j = 0; j < C; j++) own[j] = read<T, L>(w + j * step);
#pragma GCC unroll 16
            for (int j = 0; j < N * C; j++) x[j] += g[j / C][k] * own[j % C];
          }
        T sums[N * C];
        join_lanes<Sum, T, L, N * C>(x, sums);
        for (int j = 0; j < N * C; j++) out[(i + j / C) * d + e + j % C] = sums[j];
      });
    });
  }

  // out[d][k] += sum_i poses[i][d] grads[i][k]
  void of_weight(int64_t lines, const T* const* poses, const V* grads, T* out) const {
    for_blocks(d > SHALLOW && !real, [&](auto n, auto c, int64_t e, int64_t k) INLINED {
      constexpr int N = decltype(n)::value, C = decltype(c)::value;
      Block<N, C> block(*this, out, e, k, lines);
      in_blocks<N ? 1 : LINES>(lines, [&](auto m, int64_t i) INLINED {
        constexpr int M = decltype(m)::value;
        const T* p[M];
        for (int j = 0; j < M; j++) p[j] = poses[i + j] + e;
        V x[M * C];
#pragma GCC unroll 16
        for (int j = 0; j < M * C; j++) x[j] = grads[(i + j / C) * at.row + k + j % C];
#pragma GCC unroll 4
        for (int64_t f = 0; f < block.depth; f++) {
          V sums[C];
#pragma GCC unroll 4
          for (int j = 0; j < C; j++) sums[j] = block.get(f, j);
#pragma GCC unroll 16
          for (int j = 0; j < M * C; j++) sums[j % C] += p[j / C][f] * x[j];
#pragma GCC unroll 4
          for (int j = 0; j < C; j++) block.put(f, j, sums[j]);
        }
      });
      block.store_kept();
    });
  }

  // Calls f(Known<N>, Known<C>, e, k) for each block; N is 0 for deep poses.
  template <class F>
  INLINE void for_blocks(bool deep, F f) const {
    in_blocks<COLUMNS>(at.row, [&](auto c, int64_t k) INLINED {
      if (deep) return f(Known<0>(), c, 0, k);
      in_blocks<DEEP>(d, [&](auto n, int64_t e) INLINED { f(n, c, e, k); });
    });
  }

  // Few lines wait for memory, and the columns of a block are too many streams for the hardware prefetcher: fetches what
  // the next child needs, whose weights follow.
  template <int C, class P>
  INLINE void fetch_ahead(P const* column, int64_t depth) const {
    constexpr bool SHARED = 2 * L * sizeof(T) <= 64;  // neighboring columns have a cache line in common
    for (int j = 0; j < C; j += SHARED && j + 1 < C && column[j + 1] == column[j] + L ? 2 : 1)
      for (int64_t f = 0; f < depth; f++) __builtin_prefetch(column[j] + (at.tiles * d + f) * step);
  }

  const Layout<T, L>& at;
  const int64_t d, step;
  int64_t* start;     // of each column in the weights
  V* real = nullptr;  // 1, or 0 for lanes from the next row; null: there are none
};

// ---------------------------------------------------------------- the loop

// The work of a thread, apart from what a reduction computes from the votes. The reduction `Self` has
//   size_of_total(a, layout)    number of vectors in the totals of one sample; static
//   state_size()                number of vectors that `begin` packs for one sample
//   void begin(s, sample)       packs the tensors of the parents for sample s of the block
//   void group(s, count)        adds the chunk's children to the run's totals, for `count` samples from s on
//   void merge(into, from)      adds the totals of other children
//   void finish(sample, totals) writes the results of a sample
template <class Self, class T, int L>
class Worker {
 public:
  using Number = T;
  using V = Vec<T, L>;
  static constexpr bool ALONG_PARENTS = false;  // the layout has the parents in the lanes, whatever is best
  static constexpr int64_t CACHE = 1 << 18;     // bytes of data about the parents of a block of samples
  static constexpr int64_t NEAR = 24 << 10;     // bytes of the votes of a group of samples
  static constexpr int GROUP = 16;              // most samples of a group
  static constexpr int OFFSETS = CHUNK;         // children whose offsets are kept packed
  static constexpr bool VOTES = true;           // whether votes are made

  Worker(const Problem& a, const Shard& shard, SharedGradients<T>& shared)
      : a(a), places(a), at(a, places.samples(), Self::ALONG_PARENTS), product(arena, at, a.d), shard(shard),
        size(at.size), blocks(at.blocks), pose_size(a.rows * a.d), kernel(a.down * a.across),
        total_size(Self::size_of_total(a, at)),
        poses(static_cast<const T*>(a.poses)), gates(static_cast<const T*>(a.gates)),
        grad_poses(static_cast<T*>(a.into_poses)), grad_gates(static_cast<T*>(a.into_gates)),
        weight(arena, a, at, shard, a.weight, shared.of_shard(0, shard.number), a.groups, a.parents, CHUNK),
        bias(arena, a, at, shard, a.bias, shared.of_shard(1, shard.number), a.bias_groups, a.bias_parents, CHUNK),
        offset(arena, a, at, shard, a.offset, shared.of_shard(2, shard.number), a.offset_groups, a.parents, Self::OFFSETS,
               -INFINITY),
        most_of_group(group_size()) {
    tail = get(blocks);
    const int64_t lines = most_of_group * a.rows;
    lines_of_poses = arena.get<const T*>(lines);
    found = arena.get<T>(lines * a.d);
    for (V*& x : tiled) x = get(at.room);
    if (arena.failed) return;
    for (int64_t i = 0; i < blocks * L; i++) reinterpret_cast<T*>(tail)[i] = -INFINITY;
    for (int64_t j = 0; j < a.parents; j++) reinterpret_cast<T*>(tail)[at.slot(j)] = 0;
  }

  // Samples of a group: blocks of 4 lines, and more than one, whose votes fit the nearest cache. If there are none, 4
  // samples share the weights that are read from the next cache.
  int group_size() const {
    const int64_t step = a.rows < 4 ? 4 : 2, fitting = NEAR / (CHUNK * size * static_cast<int64_t>(sizeof(V))) / step * step;
    return static_cast<int>(!Self::VOTES ? 8 : fitting ? least(GROUP, fitting) : 4);
  }

  // Processes the shard. Its totals are left in `partial` if other shards have the same samples.
  void run(Watch& watch, V* partial, int64_t state_size) {
    Self& self = static_cast<Self&>(*this);
    const int64_t total = total_size;
    const int64_t fitting = Self::CACHE / (sizeof(V) * (state_size + 2 * total));
    const int64_t first = shard.first_image * places.windows, last = shard.last_image * places.windows;
    if (first == last) return;
    block = least(last - first, most(4, least(MOST_SAMPLES, fitting / 4 * 4)));
    of_run = get(block * total);
    totals = get(block * total);
    votes = get(Self::VOTES ? most_of_group * CHUNK * size : 1);
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
    const int64_t total = total_size;
    for (int64_t i = shard.first_type * kernel, end = shard.last_type * kernel; i < end;) {
      for (int64_t s = 0; s < count; s++) {
        memset(static_cast<void*>(of_run + s * total), 0, total * sizeof(V));
        self.clear(of_run + s * total);
      }
      for (int64_t run_end = least(end, i + RUN); i < run_end; i += chunk) {
        if (watch.stopped()) return false;
        chunk = static_cast<int>(least(CHUNK, run_end - i));
        for (int c = 0; c < chunk; c++) load(c, i + c);
        for (int c = 0; c < chunk; c++) next_places[c] = place_of(least(i + chunk + c, end - 1));
        for (int64_t s = 0; s < count; s += most_of_group)
          self.group(s, static_cast<int>(least(most_of_group, count - s)));
      }
      self.flush();
      for (int64_t s = 0; s < count; s++) self.merge(totals + s * total, of_run + s * total);
    }
    return true;
  }

  int64_t place_of(int64_t child) const { return places.of_child(child / kernel, child % kernel); }
  void load(int c, int64_t child) {
    const int64_t type = child / kernel, place = child % kernel;
    index[c] = child;
    child_places[c] = place_of(child);
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
    for (int64_t i = 0; i < total_size; i++) into[i] += from[i];
  }
  V* get(int64_t count) { return arena.get<V>(count); }
  // Allocates a row of numbers of the parents for each child of the chunk and sample of the group.
  void get_rows(V** rows) { get_rows(rows, most_of_group * CHUNK, blocks); }
  void get_rows(V** rows, int count, int64_t width) {
    V* all = get(count * width);
    for (int i = 0; i < count; i++) rows[i] = all + i * width;
  }
  // Returns numbers of the parents as vectors of the tiles, valid until others are put into the same place.
  INLINE const V* to_tiles(const V* numbers, int place) const { return at.to_tiles(numbers, tiled[place]); }

  INLINE const T* pose(int64_t s, int c) const { return poses + (sample_places[s] + child_places[c]) * pose_size; }
  // Fetches the poses, or gradients of poses, that the next chunk needs: those of a sample are far from the last one's.
  INLINE void prefetch(const T* x, int64_t s, int c) const {
    x += (sample_places[s] + next_places[c]) * pose_size;
    for (int64_t n = 0; n < pose_size; n += 64 / sizeof(T)) __builtin_prefetch(x + n);
  }
  INLINE int64_t gate_index(int64_t s, int c) const { return (first_sample + s) * a.types * kernel + index[c]; }
  INLINE T gate(int64_t s, int c) const { return gates ? gates[gate_index(s, c)] : T(1); }
  INLINE const V* logit_base(int c) const { return offset ? offset.row(c) : tail; }
  // The votes of child c of the chunk for sample m of the group; those for the next sample follow.
  INLINE V* vote(int m, int c) const { return votes + (c * most_of_group + m) * size; }

  // Computes the votes of child c for `count` samples from s on.
  SEPARATE void make_votes(int64_t s, int count, int c) {
    find_lines(s, count, c);
    for (int m = 0; m < count; m++) prefetch(poses, s + m, c);
    for (int m = 0; bias && m < count; m++) memcpy(static_cast<void*>(vote(m, c)), bias.row(c), size * sizeof(V));
    product.votes(count * a.rows, lines_of_poses, weight.numbers(c), bool(bias), vote(0, c));
  }
  // Adds to the gradients of poses, weight and bias, given the gradients of the votes of child c in place of the votes.
  SEPARATE void add_child_gradients(int64_t s, int count, int c) {
    find_lines(s, count, c);
    if (grad_poses) {
      product.of_poses(count * a.rows, vote(0, c), weight.numbers(c), found);
      for (int m = 0; m < count; m++) {
        T* out = grad_poses + (pose(s + m, c) - poses);
        for (int64_t n = 0; n < pose_size; n++) out[n] += found[m * pose_size + n];
        prefetch(grad_poses, s + m, c);
      }
    }
    if (T* out = weight.grad_numbers(c)) product.of_weight(count * a.rows, lines_of_poses, vote(0, c), out);
    if (V* out = bias.grad(c)) {
      for (int64_t f = 0; f < size; f++)
        for (int m = 0; m < count; m++) out[f] += vote(m, c)[f];
    }
  }
  INLINE void find_lines(int64_t s, int count, int c) {
    const T** line = lines_of_poses;
    for (int m = 0; m < count; m++) {
      const T* p = pose(s + m, c);
      for (int64_t r = 0; r < a.rows; r++) *line++ = p + r * a.d;
    }
  }

  // Sums over the features of each parent: `term(sums, f)` adds what feature f has to K sums for each of C children.
  // The sums of child c are out[k][c].
  template <int C, int K, class Term>
  INLINE void sum_features(V* const* const (&out)[K], Term term) const {
    V* sum_of[K * C];
    for (int i = 0; i < K * C; i++) sum_of[i] = at.P == 1 ? out[i / C][i % C] : tiled[i];
    for (int64_t t = 0; t < at.tiles; t++) {
      V sums[K * C] = {};
      for (int64_t r = 0; r < a.rows; r++)
        for (int64_t f = r * at.row + t * at.columns, end = f + at.columns; f < end; f++) term(sums, f);
#pragma GCC unroll 16
      for (int i = 0; i < K * C; i++) sum_of[i][t] = sums[i];
    }
    for (int i = 0; at.P > 1 && i < K * C; i++) at.sum_tiles(tiled[i], out[i / C][i % C]);
  }
  // Calls f(t, first, end) for the features of each tile, row by row.
  template <class F>
  INLINE void for_tiles(F f) const {
    for (int64_t r = 0, i = 0; r < a.rows; r++)
      for (int64_t t = 0; t < at.tiles; t++, i += at.columns) f(t, i, i + at.columns);
  }
  // Calls f(t, feature) for all features.
  template <class F>
  INLINE void for_features(F f) const {
    for_tiles([&](int64_t t, int64_t i, int64_t end) INLINED {
      for (; i < end; i++) f(t, i);
    });
  }
  // Calls f(Known<C>, c) for the chunk's children: all of a full chunk at once, others one by one.
  template <class F>
  INLINE void for_chunk(F f) const {
    if (chunk == CHUNK) return f(Known<CHUNK>(), 0);
    for (int c = 0; c < chunk; c++) f(Known<1>(), c);
  }

  // Replaces logits by coefficients, the softmax over the parents, in n rows.
  INLINE void softmax(int64_t n, V* const* logits, bool leaky) const {
    in_blocks<8>(n, [&](auto m, int64_t i) INLINED { softmax<decltype(m)::value>(logits + i, leaky); });
  }
  template <int N>
  SEPARATE void softmax(V* const* logits, bool leaky) const {
    V folded[N];
    T largest[N], sums[N];
    for (int i = 0; i < N; i++) {
      folded[i] = logits[i][0];
      for (int64_t b = 1; b < blocks; b++) folded[i] = larger<T, L>(folded[i], logits[i][b]);
    }
    join_lanes<Largest, T, L, N>(folded, largest);
    for (int i = 0; i < N; i++) {
      if (leaky && largest[i] < 0) largest[i] = 0;
      V sum = {};
      for (int64_t b = 0; b < blocks; b++) {
        logits[i][b] = exp_of<L>(logits[i][b] - largest[i]);
        sum += logits[i][b];
      }
      folded[i] = sum;
    }
    join_lanes<Sum, T, L, N>(folded, sums);
    for (int i = 0; i < N; i++) {
      if (leaky) sums[i] += exp_of<L>(splat<T, L>(-largest[i]))[0];
      sums[i] = 1 / sums[i];
      for (int64_t b = 0; b < blocks; b++) logits[i][b] *= sums[i];
    }
  }

  const Problem& a;
  const Places places;
  Arena arena;
  const Layout<T, L> at;
  const Product<T, L> product;
  const Shard shard;
  const int64_t size, blocks, pose_size, kernel, total_size;
  const T *poses, *gates;
  T *grad_poses, *grad_gates;
  Rows<T, L, Of::WEIGHT> weight;
  Rows<T, L, Of::BIAS> bias;
  Rows<T, L, Of::NUMBER> offset;
  V* tail;  // 0 for parents, -inf for the lanes beyond them
  const int most_of_group;
  const T** lines_of_poses;
  T* found;
  V* tiled[3 * CHUNK];  // room for numbers as vectors of the tiles
  V *of_run = nullptr, *totals = nullptr, *votes = nullptr;
  int64_t block = 0, first_sample = 0, sample_places[MOST_SAMPLES] = {};
  int chunk = 1;
  int64_t index[CHILDREN], child_places[CHILDREN], next_places[CHUNK];
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
