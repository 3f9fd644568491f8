// Weighted sums where children share weights, without a vote: (pose W) . q = pose . (W q), and W q is needed once for all
// children of a group. Weighted sums of poses go through W to the parents.
#pragma once
#include "sums.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

constexpr int PULLED = 1024;  // children whose poses are summed up before they are pushed through the weights

// The loop that both directions share: in a group, sample after sample; in a sample, children by the dozen with a few
// tiles of parents, so that the logits of both stay in the nearest cache. A softmax over the parents needs all tiles.
// `Base` knows what to do with logits. `Self` has, beside what a Worker needs,
//   void begin_group(count), end_group(count)   before and after the children of a group, for so many samples
//   void visit(s, count)                        sample s with so many children, whose poses are `pose_of`
template <class Self, class Base>
class Pulled : public Base {
 public:
  using T = typename Base::Number;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::features, Base::shape, Base::pose_size, Base::arena, Base::kernel, Base::shard,
      Base::chunk, Base::total_size, Base::totals;
  static constexpr int KNOWN = Base::KNOWN_POSE;
  // All samples of a block meet the weights of a group together, and each its parents but once in a group.
  static constexpr int64_t CACHE = 1 << 23;
  static constexpr int OFFSETS = CHILDREN;

  Pulled(const Problem& a, const Shard& shard, SharedGradients& shared)
      : Base(a, shard, shared), span(a.over_children ? least(tiles, 4) : tiles),
        most_children(a.over_children ? CHILDREN : static_cast<int>(most(1, least(8, 32 / tiles))) * CHUNK) {}

  bool children(Watch& watch, int64_t count) {
    Self& self = static_cast<Self&>(*this);
    const int64_t per_group = a.types / a.groups;
    for (int64_t type = shard.first_type; type < shard.last_type;) {
      const int64_t end = least(least(shard.last_type, (type / per_group + 1) * per_group), type + PULLED);
      for (int64_t place = 0; place < kernel; place++) {
        this->weight.load(0, type, place);
        self.begin_group(count);
        for (int64_t s = 0; s < count; s++) {
          if (watch.stopped()) return false;
          for (int64_t first = type; first < end; first += most_children) {
            const int own = static_cast<int>(least(most_children, end - first));
            for (int c = 0; c < own; c++) {
              this->index[c] = (first + c) * kernel + place;
              this->child_places[c] = this->places.of_child(first + c, place);
              this->offset.load(c, first + c, place);
              pose_of[c] = this->pose(s, c);
            }
            self.visit(s, own);
          }
        }
        self.end_group(count);
      }
      type = end;
    }
    Base::flush();
    return true;
  }
  template <int N>
  void group(int64_t) {}

  V* get(int64_t count) { return arena.template get<V>(count); }
  // `most_children` rows of `span` vectors.
  void get_rows(V** rows) {
    V* all = get(most_children * span);
    for (int c = 0; c < most_children; c++) rows[c] = all + c * span;
  }

  // For one tile of parents: (rows, d) of what is (rows, h).
  INLINE void pull(const V* w, const V* x, V* pulled) const {
    const int64_t D = shape.d(), H = shape.h();
    if constexpr (KNOWN > 0) {
      V sums[KNOWN] = {};
      for (int64_t h = 0; h < H; h++)
#pragma GCC unroll 16
        for (int i = 0; i < KNOWN; i++) sums[i] += w[h * D + i % D] * x[i / D * H + h];
#pragma GCC unroll 16
      for (int i = 0; i < KNOWN; i++) pulled[i] = sums[i];
    } else {
      for (int64_t r = 0; r < shape.rows(); r++)
        for (int64_t d = 0; d < D; d++) {
          V sum = {};
          for (int64_t h = 0; h < H; h++) sum += w[h * D + d] * x[r * H + h];
          pulled[r * D + d] = sum;
        }
    }
  }
  INLINE void add_pushed(const V* w, const V* pulled, V* sums) const {
    const int64_t D = shape.d(), H = shape.h();
    for (int64_t r = 0; r < shape.rows(); r++)
      for (int64_t h = 0; h < H; h++) {
        V sum = sums[r * H + h];
        for (int64_t d = 0; d < D; d++) sum += w[h * D + d] * pulled[r * D + d];
        sums[r * H + h] = sum;
      }
  }

  // Products of the poses of so many children with vectors of the parents.
  INLINE void products(int count, int64_t first_tile, int64_t last_tile, const V* pulled, V* const* out) const {
    for (int64_t t = first_tile; t < last_tile; t++) {
      int c = 0;
      for (; c + 8 <= count; c += 8) products<8>(c, pulled + t * pose_size, out, t - first_tile);
      for (; c < count; c++) products<1>(c, pulled + t * pose_size, out, t - first_tile);
    }
  }
  template <int C>
  INLINE void products(int first, const V* pulled, V* const* out, int64_t i) const {
    V sums[C] = {};
    const int64_t width = shape.pose();
#pragma GCC unroll 16
    for (int64_t n = 0; n < width; n++) {
      const V x = pulled[n];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[c] += pose_of[first + c][n] * x;
    }
    for (int c = 0; c < C; c++) out[first + c][i] = sums[c];
  }
  // Weighted sums of their poses.
  INLINE void add_poses(int count, int64_t first_tile, int64_t last_tile, V* const* weights, V* sums) const {
    for (int64_t t = first_tile, i = 0; t < last_tile; t++, i++) {
      V* out = sums + t * pose_size;
      if constexpr (KNOWN > 0) {
        V own[KNOWN];
#pragma GCC unroll 16
        for (int n = 0; n < KNOWN; n++) own[n] = out[n];
        for (int c = 0; c < count; c++) {
          const V weight = weights[c][i];
          const T* p = pose_of[c];
#pragma GCC unroll 16
          for (int n = 0; n < KNOWN; n++) own[n] += p[n] * weight;
        }
#pragma GCC unroll 16
        for (int n = 0; n < KNOWN; n++) out[n] = own[n];
      } else {
        for (int64_t n = 0; n < pose_size; n++) {
          V own = out[n];
          for (int c = 0; c < count; c++) own += pose_of[c][n] * weights[c][i];
          out[n] = own;
        }
      }
    }
  }

  const int64_t span;
  const int most_children;

 protected:
  const T* pose_of[CHILDREN];
};

template <class T, int L, class S>
class PulledSum : public Pulled<PulledSum<T, L, S>, Sums<PulledSum<T, L, S>, T, L, S>> {
 public:
  using Base = Pulled<PulledSum<T, L, S>, Sums<PulledSum<T, L, S>, T, L, S>>;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::size, Base::features, Base::pose_size, Base::span, Base::chunk, Base::total_size;
  using Base::Base;

  // Of a sample: parents that are pulled; sums of poses, masses, largest logits.
  int64_t summed_size() const { return tiles * (pose_size + 2); }
  int64_t state_size() const { return size + tiles * pose_size + summed_size(); }

  void make_room() {
    Base::make_room();
    pulled = this->get(this->block * tiles * pose_size);
    summed = this->get(this->block * summed_size());
    pushed = this->get(features);
    this->get_rows(rows);
  }
  void begin_group(int64_t count) {
    const V* w = this->weight.row(0);
    for (int64_t t = 0; t < tiles; t++, w += this->shape.h() * this->shape.d())
      for (int64_t s = 0; s < count; s++)
        this->pull(w, this->query + s * size + t * features, pulled + (s * tiles + t) * pose_size);
    for (int64_t s = 0; s < count; s++) {
      V *sums = summed + s * summed_size(), *largest = sums + tiles * (pose_size + 1);
      memset(static_cast<void*>(sums), 0, summed_size() * sizeof(V));
      for (int64_t t = 0; t < tiles; t++) largest[t] = splat<T, L>(-INFINITY);
    }
  }
  void visit(int64_t s, int count) {
    V* sums = summed + s * summed_size();
    for (int64_t t = 0; t < tiles; t += span) {
      const int64_t end = least(tiles, t + span);
      this->products(count, t, end, pulled + s * tiles * pose_size, rows);
      if (a.over_children) {
        this->weigh_children(s, count, t, end, rows, sums, pose_size, sums + tiles * pose_size);
      } else {
        for (int first = 0; first < count; first += CHUNK) {
          chunk = static_cast<int>(least(CHUNK, count - first));
          this->template weigh_parents<1>(s, first, rows + first);
        }
      }
      this->add_poses(count, t, end, rows, sums);
    }
  }
  void end_group(int64_t count) {
    const V* w = this->weight.row(0);
    for (int64_t t = 0; t < tiles; t++, w += this->shape.h() * this->shape.d())
      for (int64_t s = 0; s < count; s++) {
        const V *sums = summed + s * summed_size(), *mass = sums + tiles * pose_size;
        V* total = this->totals + s * total_size;
        if (!a.over_children) {
          this->add_pushed(w, sums + t * pose_size, total + t * features);
          continue;
        }
        for (int64_t f = 0; f < features; f++) pushed[f] = V{};
        this->add_pushed(w, sums + t * pose_size, pushed);
        this->merge_tile(t, total, pushed, mass[t], mass[tiles + t]);
      }
  }

 private:
  V *pulled, *summed, *pushed, *rows[CHILDREN];
};

template <class T, int L, class S>
class PulledSumBackward : public Pulled<PulledSumBackward<T, L, S>, SumsBackward<PulledSumBackward<T, L, S>, T, L, S>> {
 public:
  using Base = Pulled<PulledSumBackward<T, L, S>, SumsBackward<PulledSumBackward<T, L, S>, T, L, S>>;
  using V = typename Base::V;
  using Base::tiles, Base::pose_size, Base::size, Base::features, Base::chunk, Base::span, Base::KNOWN;
  using Base::Base;

  // Of a sample, (tiles, pose) each: the query and the gradient of the sums, pulled, and sums of poses weighted with
  // the gradients of the logits and with the weights.
  int64_t state_size() const { return Base::state_size() + 4 * tiles * pose_size; }

  void make_room() {
    Base::make_room();
    for (V** x : {&query_pulled, &grad_pulled, &sloped, &weighted})
      *x = this->get(this->block * tiles * pose_size);
    for (V** x : {slopes, shares, gains}) this->get_rows(x);
    of_poses = this->get(this->most_children * pose_size);
  }
  void begin_group(int64_t count) {
    const V* w = this->weight.row(0);
    for (int64_t t = 0; t < tiles; t++, w += this->shape.h() * this->shape.d())
      for (int64_t s = 0; s < count; s++) {
        const int64_t from = s * size + t * features, to = (s * tiles + t) * pose_size;
        this->pull(w, this->query + from, query_pulled + to);
        this->pull(w, this->grad + from, grad_pulled + to);
      }
    for (V* x : {sloped, weighted}) memset(static_cast<void*>(x), 0, count * tiles * pose_size * sizeof(V));
  }
  void visit(int64_t s, int count) {
    const int64_t at = s * tiles * pose_size;
    memset(static_cast<void*>(of_poses), 0, count * pose_size * sizeof(V));
    for (int64_t t = 0; t < tiles; t += span) {
      const int64_t end = least(tiles, t + span);
      this->products(count, t, end, query_pulled + at, slopes);
      this->products(count, t, end, grad_pulled + at, gains);
      if (this->a.over_children) {
        this->of_logits_of_children(s, count, t, end, slopes, shares, gains, nullptr);
      } else {
        for (int first = 0; first < count; first += CHUNK) {
          chunk = static_cast<int>(least(CHUNK, count - first));
          for (int c = 0; c < chunk; c++) {
            this->logits[c] = slopes[first + c];
            this->weights[c] = shares[first + c];
            this->benefits[c] = gains[first + c];
          }
          this->template of_logits_of_parents<1>(s, first);
        }
      }
      this->add_poses(count, t, end, slopes, sloped + at);
      this->add_poses(count, t, end, shares, weighted + at);
      if (!this->grad_poses) continue;
      int c = 0;
      for (; c + CHUNK <= count; c += CHUNK) add_of_poses<CHUNK>(c, t, end, at);
      for (; c < count; c++) add_of_poses<1>(c, t, end, at);
    }
    if (!this->grad_poses) return;
    for (int c = 0; c < count; c++) {
      T* out = this->grad_poses + (this->pose_of[c] - this->poses);
      if constexpr (KNOWN > 0) {
        join_lanes<Sum, T, L, KNOWN>(of_poses + c * KNOWN, this->found);
        for (int n = 0; n < KNOWN; n++) out[n] += this->found[n];
      } else {
        for (int64_t n = 0; n < pose_size; n++) out[n] += sum_of_lanes<T, L>(of_poses[c * pose_size + n]);
      }
    }
  }
  template <int C>
  INLINE void add_of_poses(int first, int64_t t, int64_t end, int64_t at) {
    constexpr int N = KNOWN > 0 ? 4 : 1;  // of the numbers of a pose at once
    const int64_t span = end - t;
    for (int64_t n = 0; n < pose_size; n += N) {
      V sums[C * N];
#pragma GCC unroll 16
      for (int i = 0; i < C * N; i++) sums[i] = of_poses[(first + i / N) * pose_size + n + i % N];
      for (int64_t i = 0; i < span; i++) {
        const V *q = query_pulled + at + (t + i) * pose_size + n, *g = grad_pulled + at + (t + i) * pose_size + n;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          const V slope = slopes[first + c][i], weight = shares[first + c][i];
#pragma GCC unroll 4
          for (int k = 0; k < N; k++) sums[c * N + k] += slope * q[k] + weight * g[k];
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < C * N; i++) of_poses[(first + i / N) * pose_size + n + i % N] = sums[i];
    }
  }
  void end_group(int64_t count) {
    const int64_t R = this->shape.rows(), D = this->shape.d(), H = this->shape.h();
    const V* w = this->weight.row(0);
    V* out = this->weight.grad(0);
    for (int64_t t = 0; t < tiles; t++, w += H * D) {
      for (int64_t s = 0; s < count; s++)
        this->add_pushed(w, sloped + (s * tiles + t) * pose_size, this->totals + s * size + t * features);
      for (int64_t h = 0; out && h < H; h++, out += D)
        for (int64_t s = 0; s < count; s++)
          for (int64_t r = 0; r < R; r++) {
            const int64_t from = s * size + t * features + r * H + h, to = (s * tiles + t) * pose_size + r * D;
            const V q = this->query[from], g = this->grad[from];
            for (int64_t d = 0; d < D; d++) out[d] += sloped[to + d] * q + weighted[to + d] * g;
          }
    }
  }

 private:
  V *query_pulled, *grad_pulled, *sloped, *weighted, *of_poses;
  V *slopes[CHILDREN], *shares[CHILDREN], *gains[CHILDREN];
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
