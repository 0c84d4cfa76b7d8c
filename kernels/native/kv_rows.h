// K and V of one token and head as the pools hold them: fp32, bf16, or fp8 with an fp32 scale behind the values.
#pragma once

#include "vec.h"

// Elements of a row beyond its values.
template <typename K>
constexpr int64_t EXTRA = 0;
template <>
constexpr int64_t EXTRA<fp8> = sizeof(float);

static inline float scale_of(const fp8* row, int64_t size) {
  float scale;
  std::memcpy(&scale, row + size, sizeof scale);
  return scale;
}

// Write a row. A value that is not finite makes the scale, and with it the row, NaN.
static inline void put_kv(fp8* to, const float* x, int64_t size) {
  vf most = {}, wrong = {};
  for (int64_t d = 0; d < size; d += LANES) {
    vf v = load_some(x + d, size - d);
    most = max(most, v < 0.f ? -v : v);
    wrong += v - v;
  }
  float scale = largest(most) / 448.f + sum(wrong);
  vf by = splat(scale == 0.f ? 1.f : scale);
  for (int64_t d = 0; d < size; d += LANES) store_some(to + d, load_some(x + d, size - d) / by, size - d);
  std::memcpy(to + size, &scale, sizeof scale);
}

// A row as fp32: itself if it is that already, else widened into `to`.
static inline const float* as_floats(const float* row, int64_t, float*) { return row; }

static inline const float* as_floats(const bf16* row, int64_t size, float* to) {
  for (int64_t d = 0; d < size; d += LANES) store_some(to + d, load_some(row + d, size - d), size - d);
  return to;
}

static inline const float* as_floats(const fp8* row, int64_t size, float* to) {
  vf scale = splat(scale_of(row, size));
  for (int64_t d = 0; d < size; d += LANES) store_some(to + d, load_some(row + d, size - d) * scale, size - d);
  return to;
}
