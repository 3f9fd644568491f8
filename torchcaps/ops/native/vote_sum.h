// The sum of the votes, forward and backward, computed without votes. Poses of children that share weights are summed
// first.
#pragma once
#include "worker.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

// The loop of forward and backward. A unit is the children of a group at one place of the window; a chunk has as many
// units as it has children elsewhere. Beside the members that a Worker needs, `Self` has
//   template <int N> void units(s)   processes the units of the chunk for N samples from s on; see `pose_of`
//   void biases(s)                   processes the units of the chunk for sample s; their children share a bias
//   void end_run(count)              called after a run, for `count` samples
template <class Self, class T, int L, class S>
class VoteSumLoop : public Worker<Self, T, L, S> {
 public:
  using Base = Worker<Self, T, L, S>;
  using V = typename Base::V;
  using Base::a, Base::size, Base::kernel, Base::shard, Base::chunk, Base::M, Base::arena, Base::pose_size;

  VoteSumLoop(const Problem& a, const Shard& shard, SharedGradients& shared)
      : Base(a, shard, shared), total_size(Self::size_of_total(a, size, 0)), per_group(a.types / a.groups) {}

  void make_room() {
    for (int i = 0; i < M * CHUNK; i++) sums[i] = arena.template get<T>(pose_size);
  }

  bool children(Watch& watch, int64_t count) {
    Self& self = static_cast<Self&>(*this);
    for (int64_t i = shard.first_type * kernel, end = shard.last_type * kernel, start = i; i < end;) {
      i = fill_chunk(i, end, per_group);
      for (int c = 0; c < chunk; c++) this->weight.load(c, first_type[c], this->index[c]);
      if (watch.stopped()) return false;
      int64_t s = 0;
      for (; M > 1 && s + M <= count; s += M) self.template units<M>(s);
      for (; s < count; s++) self.template units<1>(s);
      if (i - start >= RUN || i >= end) {
        start = i;
        this->weight.flush_all();
        self.end_run(count);
      }
    }
    const int64_t per_bias = this->bias ? a.types / a.bias_groups : 1;
    for (int64_t i = shard.first_type * kernel, end = shard.last_type * kernel; this->bias && i < end;) {
      if (watch.stopped()) return false;
      i = fill_chunk(i, end, per_bias);
      for (int c = 0; c < chunk; c++) this->bias.load(c, first_type[c], this->index[c]);
      for (int64_t s = 0; s < count; s++) self.biases(s);
    }
    this->bias.flush_all();
    return true;
  }
  template <int N>
  void group(int64_t) {}

  // Fills the chunk with the units from child i on: the places of a group, then the next group. Returns the child that
  // the next chunk begins with.
  int64_t fill_chunk(int64_t i, int64_t end, int64_t in_group) {
    for (chunk = 0; chunk < CHUNK && i < end; chunk++) {
      const int64_t type = i / kernel, place = i % kernel;
      first_type[chunk] = type;
      last_type[chunk] = least(shard.last_type, (type / in_group + 1) * in_group);
      this->index[chunk] = place;
      this->child_places[chunk] = this->places.of_child(type, place);
      i = place + 1 < kernel ? i + 1 : last_type[chunk] * kernel;
    }
    return i;
  }
  // The sum of the gates of a unit.
  INLINE T gates_of(int64_t s, int c) const {
    if (!this->gates) return static_cast<T>(last_type[c] - first_type[c]);
    T sum = 0;
    for (int64_t type = first_type[c]; type < last_type[c]; type++) sum += this->gates[gate_of(s, c, type)];
    return sum;
  }

  INLINE int64_t type_step() const { return a.height * a.width * pose_size; }
  INLINE int64_t gate_of(int64_t s, int c, int64_t type) const {
    return ((this->first_sample + s) * a.types + type) * kernel + this->index[c];
  }
  // The sum of the gated poses of a unit for sample s.
  INLINE const T* pose_of(int64_t s, int c, int i) {
    const T* p = this->pose(s, c);
    if (per_group == 1 && !this->gates) return p;
    T* sum = sums[i];
    for (int64_t n = 0; n < pose_size; n++) sum[n] = 0;
    for (int64_t type = first_type[c]; type < last_type[c]; type++, p += type_step()) {
      const T gate = this->gates ? this->gates[gate_of(s, c, type)] : T(1);
      for (int64_t n = 0; n < pose_size; n++) sum[n] += gate * p[n];
    }
    return sum;
  }

  const int64_t total_size, per_group;

 protected:
  T* sums[M * CHUNK];
  int64_t first_type[CHUNK], last_type[CHUNK];
};

template <class T, int L, class S>
class VoteSum : public VoteSumLoop<VoteSum<T, L, S>, T, L, S> {
 public:
  using Base = VoteSumLoop<VoteSum<T, L, S>, T, L, S>;
  using V = typename Base::V;
  using Base::Base;
  using Base::a, Base::tiles, Base::size, Base::features, Base::chunk, Base::of_run, Base::totals, Base::shape, Base::weight;

  static int64_t size_of_total(const Problem&, int64_t size, int64_t) { return size; }
  int64_t state_size() const { return 0; }
  void begin(int64_t, int64_t) {}

  template <int N>
  INLINE void units(int64_t s) {
    const T* p[N * CHUNK];
    for (int m = 0; m < N; m++)
      for (int c = 0; c < chunk; c++) p[m * CHUNK + c] = this->pose_of(s + m, c, m * CHUNK + c);
    const int64_t R = shape.rows(), D = shape.d(), H = shape.h();
    for (int64_t tile = 0; tile < tiles; tile++) {
      if constexpr (S::ROWS > 0) {
        constexpr int ROWS = S::ROWS, COLUMNS = 4;
        static_assert(S::HEIGHT % COLUMNS == 0);
        for (int64_t h = 0; h < H; h += COLUMNS) {
          V x[N * ROWS * COLUMNS];
          V* out[N];
#pragma GCC unroll 4
          for (int m = 0; m < N; m++) {
            out[m] = of_run + (s + m) * size + tile * features + h;
#pragma GCC unroll 16
            for (int i = 0; i < ROWS * COLUMNS; i++)
              x[m * ROWS * COLUMNS + i] = out[m][i / COLUMNS * H + i % COLUMNS];
          }
          for (int c = 0; c < chunk; c++) {
            const V* w = weight.row(c) + (tile * H + h) * D;
#pragma GCC unroll 2
            for (int64_t d = 0; d < D; d++)
#pragma GCC unroll 4
              for (int m = 0; m < N; m++)
#pragma GCC unroll 16
                for (int i = 0; i < ROWS * COLUMNS; i++)
                  x[m * ROWS * COLUMNS + i] += p[m * CHUNK + c][i / COLUMNS * D + d] * w[i % COLUMNS * D + d];
          }
#pragma GCC unroll 4
          for (int m = 0; m < N; m++)
#pragma GCC unroll 16
            for (int i = 0; i < ROWS * COLUMNS; i++)
              out[m][i / COLUMNS * H + i % COLUMNS] = x[m * ROWS * COLUMNS + i];
        }
      } else {
        for (int c = 0; c < chunk; c++)
          for (int m = 0; m < N; m++)
            for (int64_t r = 0; r < R; r++)
              for (int64_t h = 0; h < H; h++) {
                const V* w = weight.row(c) + (tile * H + h) * D;
                V& x = of_run[(s + m) * size + tile * features + r * H + h];
                for (int64_t d = 0; d < D; d++) x += p[m * CHUNK + c][r * D + d] * w[d];
              }
      }
    }
  }
  void biases(int64_t s) {
    for (int c = 0; c < chunk; c++) {
      const T gates = this->gates_of(s, c);
      const V* row = this->bias.row(c);
      for (int64_t f = 0; f < size; f++) totals[s * size + f] += gates * row[f];
    }
  }
  void end_run(int64_t count) {
    for (int64_t i = 0; i < count * size; i++) {
      totals[i] += of_run[i];
      of_run[i] = V{};
    }
  }
  void finish(int64_t sample, V* total) const {
    unpack<T, L>(total, a.parents, features, static_cast<T*>(a.results[0]) + sample * a.parents * features);
  }
};

template <class T, int L, class S>
class VoteSumBackward : public VoteSumLoop<VoteSumBackward<T, L, S>, T, L, S> {
 public:
  using Base = VoteSumLoop<VoteSumBackward<T, L, S>, T, L, S>;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::size, Base::features, Base::chunk, Base::pose_size, Base::total_size;

  using Base::Base;
  static int64_t size_of_total(const Problem&, int64_t, int64_t) { return 0; }
  int64_t state_size() const { return size; }

  void make_room() {
    Base::make_room();
    grad = this->arena.template get<V>(this->block * size);
  }
  void begin(int64_t s, int64_t sample) {
    const T* x = static_cast<const T*>(a.grads[0]) + sample * a.parents * features;
    pack<T, L>(x, a.parents, features, 0, grad + s * size);
  }
  template <int N>
  INLINE void units(int64_t s) {
    const V* own[N];
    for (int m = 0; m < N; m++) own[m] = grad + (s + m) * size;
    for (int c = 0; c < chunk; c++) {
      const T* p[N];
      for (int m = 0; m < N; m++) p[m] = this->pose_of(s + m, c, m * CHUNK + c);
      this->template add_weight_gradient<N>(c, p, own);
      for (int m = 0; (this->grad_poses || this->grad_gates) && m < N; m++) {
        this->pose_gradient(c, own[m], this->found);
        const T* found = this->found;
        const T* p = this->pose(s + m, c);
        for (int64_t type = this->first_type[c]; type < this->last_type[c]; type++, p += this->type_step()) {
          const int64_t at = this->gate_of(s + m, c, type);
          const T gate = this->gates ? this->gates[at] : T(1);
          T* out = this->grad_poses + (p - this->poses);
          for (int64_t n = 0; this->grad_poses && n < pose_size; n++) out[n] += gate * found[n];
          for (int64_t n = 0; this->grad_gates && n < pose_size; n++) this->grad_gates[at] += p[n] * found[n];
        }
      }
    }
  }
  void biases(int64_t s) {
    const V* own = grad + s * size;
    for (int c = 0; c < chunk; c++) {
      const T gates = this->gates_of(s, c);
      V* out = this->bias.grad(c);
      for (int64_t f = 0; out && f < size; f++) out[f] += gates * own[f];
      if (!this->grad_gates) continue;
      const V* row = this->bias.row(c);
      V sum = {};
      for (int64_t f = 0; f < size; f++) sum += row[f] * own[f];
      const T of_gate = sum_of_lanes<T, L>(sum);
      for (int64_t type = this->first_type[c]; type < this->last_type[c]; type++)
        this->grad_gates[this->gate_of(s, c, type)] += of_gate;
    }
  }
  void end_run(int64_t) {}
  void finish(int64_t, V*) const {}

 private:
  V* grad;
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
