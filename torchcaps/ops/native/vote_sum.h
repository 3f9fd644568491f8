// The sum of the votes, forward and backward, computed without votes. Poses of children that share weights are summed
// first.
#pragma once
#include "worker.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

// The loop of forward and backward. A unit is the children of a group at one place of the window; a chunk has as many
// units as it has children elsewhere. Beside the members that a Worker needs, `Self` has
//   void units(s, count)   processes the units of the chunk for `count` samples from s on; see `find_lines`
//   void biases(s)         processes the units of the chunk for sample s; their children share a bias
//   void end_run(count)    called after a run, for `count` samples
template <class Self, class T, int L>
class VoteSumLoop : public Worker<Self, T, L> {
 public:
  using Base = Worker<Self, T, L>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::size, Base::kernel, Base::shard, Base::chunk, Base::arena, Base::pose_size;
  static constexpr bool VOTES = false;

  using Base::Base;

  void make_room() { sums = arena.template get<T>(this->most_of_group * pose_size); }

  bool children(Watch& watch, int64_t count) {
    Self& self = static_cast<Self&>(*this);
    for (int64_t i = shard.first_type * kernel, end = shard.last_type * kernel, start = i; i < end;) {
      i = fill_chunk(i, end, per_group);
      for (int c = 0; c < chunk; c++) this->weight.load(c, first_type[c], this->index[c]);
      if (watch.stopped()) return false;
      for (int64_t s = 0; s < count; s += this->most_of_group)
        self.units(s, static_cast<int>(least(this->most_of_group, count - s)));
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
  void group(int64_t, int) {}

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
  // Finds the sums of the gated poses of a unit, for `count` samples.
  INLINE void find_lines(int64_t s, int count, int c) {
    const T** line = this->lines_of_poses;
    for (int m = 0; m < count; m++) {
      const T* p = pose_of(s + m, c, sums + m * pose_size);
      __builtin_prefetch(this->pose((s + m + count) % MOST_SAMPLES, c));  // of the next samples
      for (int64_t r = 0; r < a.rows; r++) *line++ = p + r * a.d;
    }
  }
  INLINE const T* pose_of(int64_t s, int c, T* sum) const {
    const T* p = this->pose(s, c);
    if (per_group == 1 && !this->gates) return p;
    for (int64_t n = 0; n < pose_size; n++) sum[n] = 0;
    for (int64_t type = first_type[c]; type < last_type[c]; type++, p += type_step()) {
      const T gate = this->gates ? this->gates[gate_of(s, c, type)] : T(1);
      for (int64_t n = 0; n < pose_size; n++) sum[n] += gate * p[n];
    }
    return sum;
  }

  const int64_t per_group = a.types / a.groups;

 protected:
  T* sums;
  int64_t first_type[CHUNK], last_type[CHUNK];
};

template <class T, int L>
class VoteSum : public VoteSumLoop<VoteSum<T, L>, T, L> {
 public:
  using Base = VoteSumLoop<VoteSum<T, L>, T, L>;
  using V = typename Base::V;
  using Base::Base;
  using Base::a, Base::at, Base::size, Base::chunk, Base::of_run, Base::totals;

  static int64_t size_of_total(const Problem&, const Layout<T, L>& at) { return at.size; }
  int64_t state_size() const { return 0; }
  void begin(int64_t, int64_t) {}

  void units(int64_t s, int count) {
    for (int c = 0; c < chunk; c++) {
      this->find_lines(s, count, c);
      this->product.votes(count * a.rows, this->lines_of_poses, this->weight.numbers(c), true, of_run + s * size);
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
  void finish(int64_t sample, V* total) const { at.unpack(total, a.results[0], sample); }
};

template <class T, int L>
class VoteSumBackward : public VoteSumLoop<VoteSumBackward<T, L>, T, L> {
 public:
  using Base = VoteSumLoop<VoteSumBackward<T, L>, T, L>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::size, Base::chunk, Base::pose_size;

  using Base::Base;
  static int64_t size_of_total(const Problem&, const Layout<T, L>&) { return 0; }
  int64_t state_size() const { return size; }

  void make_room() {
    Base::make_room();
    grad = this->get(this->block * size);
  }
  void begin(int64_t s, int64_t sample) { at.pack(a.grads[0], grad + s * size, sample); }
  void units(int64_t s, int count) {
    for (int c = 0; c < chunk; c++) {
      this->find_lines(s, count, c);
      const int64_t lines = count * a.rows;
      if (T* out = this->weight.grad_numbers(c)) this->product.of_weight(lines, this->lines_of_poses, grad + s * size, out);
      if (!this->grad_poses && !this->grad_gates) continue;
      this->product.of_poses(lines, grad + s * size, this->weight.numbers(c), this->found);
      for (int m = 0; m < count; m++) add_to_children(s + m, c, this->found + m * pose_size);
    }
  }
  // Adds the gradient of a sum of gated poses to those of its poses and gates.
  INLINE void add_to_children(int64_t s, int c, const T* found) {
    const T* p = this->pose(s, c);
    for (int64_t type = this->first_type[c]; type < this->last_type[c]; type++, p += this->type_step()) {
      const int64_t i = this->gate_of(s, c, type);
      const T gate = this->gates ? this->gates[i] : T(1);
      T* out = this->grad_poses + (p - this->poses);
      for (int64_t n = 0; this->grad_poses && n < pose_size; n++) out[n] += gate * found[n];
      for (int64_t n = 0; this->grad_gates && n < pose_size; n++) this->grad_gates[i] += p[n] * found[n];
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
