// The matrix product that everything else is built from: rows in fp32, weights in panels of fp32 or bf16.
//
// Each element is one chain of fused multiply-adds over k in ascending order, whatever rows are computed beside
// it: a row's result does not depend on the batch.
#pragma once

#include "threads.h"
#include "vec.h"

constexpr int NR = 2 * LANES;             // columns of a panel: [k][NR], the last one padded with zeros
constexpr int MR = LANES == 8 ? 6 : 12;   // rows of a tile: as many accumulators as the registers hold
constexpr int64_t BLOCK_ROWS = MR * 16;   // rows packed at once: 192 KB at k = 512, half of an L2

// acc[r][c] += a(r, k) * b(k, c) over PANELS panels that lie `panel` elements apart.
template <int ROWS, int PANELS, typename W>
static inline void multiply(int64_t depth, const float* a, int64_t a_row, int64_t a_k, const W* b, int64_t b_k,
                            int64_t panel, vf (&acc)[ROWS][2 * PANELS]) {
  for (int64_t k = 0; k < depth; k++) {
    vf weights[2 * PANELS];
    for (int p = 0; p < PANELS; p++) {
      weights[2 * p] = load(b + p * panel);
      weights[2 * p + 1] = load(b + p * panel + LANES);
    }
    for (int r = 0; r < ROWS; r++) {
      vf x = splat(a[r * a_row]);
      for (int c = 0; c < 2 * PANELS; c++) acc[r][c] += x * weights[c];
    }
    a += a_k;
    b += b_k;
  }
}

// Calls f(std::integral_constant-like tag) with the row count as a constant.
template <int N>
struct Count {
  static constexpr int value = N;
};

template <typename F, int N = MR>
static inline void with_rows(int64_t rows, F&& f) {
  if constexpr (N == 1) {
    f(Count<1>{});
  } else {
    if (rows == N) return f(Count<N>{});
    with_rows<F, N - 1>(rows, static_cast<F&&>(f));
  }
}

// Rows packed as [tile][k][rows of the tile], so that a tile reads one stream. Tiles are MR rows, the last fewer.
template <typename Row>
static inline void pack_rows(int64_t rows, int64_t depth, float* packed, Row&& row) {
  for (int64_t begin = 0; begin < rows; begin += MR) {
    int64_t tile = rows - begin < MR ? rows - begin : MR;
    for (int64_t r = 0; r < tile; r++) row(begin + r, packed + begin * depth + r, tile);
  }
}

// Panels as fp32: for more rows than one tile it is cheaper to widen bf16 once than in every tile.
static inline const float* widened(const float* panel, int64_t) { return panel; }

static inline const float* widened(const bf16* panel, int64_t size) {
  float* wide = scratch(7, size);
  for (int64_t i = 0; i < size; i += LANES) store(wide + i, load(panel + i));
  return wide;
}

// For packed rows: emit(row, column, low, high) gets each row's NR sums of each panel in [first, last).
template <typename W, typename Emit>
static inline void multiply_packed(int64_t rows, int64_t depth, const float* packed, const W* panels, int64_t first,
                                   int64_t last, Emit&& emit) {
  int64_t size = depth * NR;
  int64_t p = first;
  if (rows <= MR / 2) {
    // Few rows: two panels at once keep enough sums in flight.
    for (; p + 1 < last; p += 2)
      with_rows(rows, [&](auto count) {
        constexpr int R = decltype(count)::value;
        if constexpr (R <= MR / 2) {
          vf acc[R][4] = {};
          multiply<R, 2>(depth, packed, 1, R, panels + p * size, NR, size, acc);
          for (int r = 0; r < R; r++) {
            emit(int64_t(r), p * NR, acc[r][0], acc[r][1]);
            emit(int64_t(r), p * NR + NR, acc[r][2], acc[r][3]);
          }
        }
      });
  }
  for (; p < last; p++) {
    auto tiles = [&](const auto* panel) {
      for (int64_t begin = 0; begin < rows; begin += MR)
        with_rows(rows - begin < MR ? rows - begin : MR, [&](auto count) {
          constexpr int R = decltype(count)::value;
          vf acc[R][2] = {};
          multiply<R, 1>(depth, packed + begin * depth, 1, R, panel, NR, size, acc);
          for (int r = 0; r < R; r++) emit(begin + r, p * NR, acc[r][0], acc[r][1]);
        });
    };
    if (rows <= MR)
      tiles(panels + p * size);
    else
      tiles(widened(panels + p * size, size));
  }
}

// 1 / root mean square of a row, the factor of RMSNorm.
template <typename T>
static inline float inverse_rms(const T* x, int64_t size, float eps) {
  vf total = {};
  for (int64_t k = 0; k < size; k += LANES) {
    vf v = load_some(x + k, size - k);
    total += v * v;
  }
  return 1.f / __builtin_sqrtf(sum(total) / float(size) + eps);
}

// Write row x, times its RMSNorm factor and weight if `norm` is given, to every `stride`-th place.
template <typename T>
static inline void put_row(const T* x, int64_t size, const float* norm, float eps, float* to, int64_t stride) {
  if (norm == nullptr) {
    for (int64_t k = 0; k < size; k++) to[k * stride] = to_float(x[k]);
    return;
  }
  float factor = inverse_rms(x, size, eps);
  for (int64_t k = 0; k < size; k++) to[k * stride] = to_float(x[k]) * factor * norm[k];
}

static inline int64_t panels_of(int64_t columns) { return (columns + NR - 1) / NR; }

// A number of panels per task that gives each thread a few tasks of one block of rows.
static inline int64_t panels_per_task(int64_t panels) {
  int64_t tasks = pool().size() == 1 ? 1 : pool().size() * 2;
  return (panels + tasks - 1) / tasks;
}
