// Causal attention over paged KV, with window and sink, for chunks and single tokens alike.
//
// Keys are taken in tiles at fixed absolute positions and rows never mix, so a query's result depends neither on
// how its request was cut into chunks nor on the batch. Softmax is the usual running one, in fp32.
#pragma once

#include "gemm.h"
#include "kv_rows.h"
#include "pages.h"

#if TRANSOM_LANES >= 8
#include <immintrin.h>
#endif

constexpr int64_t KEYS = 64;  // keys of a tile
static_assert(KEYS % NR == 0, "a tile of keys is whole panels");
constexpr int64_t TILE_ROWS = 96;  // query rows (tokens * heads of a KV head) that share the work on K and V

template <typename K>
struct Paged {
  const K* k;  // (kv_heads, slots, head_dim + EXTRA)
  const K* v;  // (kv_heads, slots, v_head_dim + EXTRA)
  int64_t slots;
  Tables tables;
  int64_t heads, kv_heads, head_dim, v_head_dim, window;  // window 0: all earlier keys
  float scale;
  const float* sink;  // (heads) or null
};

// to[d][lane] = rows[lane][d] for 8 lanes; `to` has KEYS columns.
static inline void transpose8(const float* const (&rows)[8], int64_t size, float* to) {
  int64_t d = 0;
#if TRANSOM_LANES >= 8
  for (; d + 8 <= size; d += 8) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows[i] + d);
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
      _mm256_storeu_ps(to + (d + i) * KEYS, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
      _mm256_storeu_ps(to + (d + i + 4) * KEYS, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
  }
#endif
  for (; d < size; d++)
    for (int i = 0; i < 8; i++) to[d * KEYS + i] = rows[i][d];
}

// One span, KV head and run of query tokens: everything a task needs.
template <typename K>
class Tile {
 public:
  Tile(const Paged<K>& kv, const Span& span, int64_t head, int64_t begin, int64_t tokens)
      : kv_(kv), span_(span), head_(head), begin_(begin), tokens_(tokens), group_(kv.heads / kv.kv_heads),
        rows_(tokens * group_), wide_(panels_of(kv.v_head_dim) * NR) {
    queries_ = scratch(0, rows_ * kv.head_dim);
    scores_ = scratch(1, rows_ * KEYS);
    sums_ = scratch(2, rows_ * wide_);
    most_ = scratch(3, rows_ * 2);
    total_ = most_ + rows_;
    keys_ = scratch(4, kv.head_dim * KEYS);
    values_ = scratch(5, KEYS * wide_);
    row_ = scratch(6, 9 * kv.head_dim);
  }

  // q and out are (tokens, heads, dim) from the span's first row on.
  template <typename T>
  void run(const T* q, int64_t q_row, T* out) {
    pack_rows(rows_, kv_.head_dim, queries_, [&](int64_t row, float* to, int64_t stride) {
      const T* x = q + (begin_ + row / group_) * q_row + (head_ * group_ + row % group_) * kv_.head_dim;
      for (int64_t d = 0; d < kv_.head_dim; d++) to[d * stride] = to_float(x[d]) * kv_.scale;
    });
    for (int64_t row = 0; row < rows_; row++) {
      most_[row] = kv_.sink ? kv_.sink[head_ * group_ + row % group_] : -__builtin_inff();
      total_[row] = kv_.sink ? 1.f : 0.f;
    }
    std::memset(sums_, 0, rows_ * wide_ * sizeof(float));
    int64_t last = span_.position + begin_ + tokens_ - 1, low = first_key(span_.position + begin_);
    for (int64_t tile = low / KEYS * KEYS; tile <= last; tile += KEYS) {
      int64_t from = (low > tile ? low : tile) - tile, to = last + 1 < tile + KEYS ? last + 1 - tile : KEYS;
      score(tile, from, to);
      for (int64_t row = 0; row < rows_; row++) weigh(row, tile, from, to);
      add_values(tile, from, to);
    }
    for (int64_t row = 0; row < rows_; row++) {
      T* to = out + ((begin_ + row / group_) * kv_.heads + head_ * group_ + row % group_) * kv_.v_head_dim;
      float factor = 1.f / total_[row];
      for (int64_t d = 0; d < kv_.v_head_dim; d += LANES)
        store_some(to + d, load(sums_ + row * wide_ + d) * factor, kv_.v_head_dim - d);
    }
  }

 private:
  int64_t first_key(int64_t position) const {
    return kv_.window && position >= kv_.window ? position - kv_.window + 1 : 0;
  }

  const K* key_at(int64_t position) const {
    return kv_.k + (head_ * kv_.slots + kv_.tables.slot(span_, position)) * (kv_.head_dim + EXTRA<K>);
  }

  const K* value_at(int64_t position) const {
    return kv_.v + (head_ * kv_.slots + kv_.tables.slot(span_, position)) * (kv_.v_head_dim + EXTRA<K>);
  }

  // scores[row][from..to) = q . k of the tile's keys.
  void score(int64_t tile, int64_t from, int64_t to) {
    float* zeros = row_ + 8 * kv_.head_dim;
    std::memset(zeros, 0, kv_.head_dim * sizeof(float));
    int64_t first = from / NR, last = (to + NR - 1) / NR;
    for (int64_t lane = first * NR; lane < last * NR; lane += 8) {
      const float* rows[8];
      for (int i = 0; i < 8; i++) {
        bool there = lane + i >= from && lane + i < to;
        rows[i] = there ? as_floats(key_at(tile + lane + i), kv_.head_dim, row_ + i * kv_.head_dim) : zeros;
      }
      transpose8(rows, kv_.head_dim, keys_ + lane);
    }
    for (int64_t p = first; p < last; p++)
      for (int64_t begin = 0; begin < rows_; begin += MR)
        with_rows(rows_ - begin < MR ? rows_ - begin : MR, [&](auto count) {
          constexpr int R = decltype(count)::value;
          vf acc[R][2] = {};
          multiply<R, 1>(kv_.head_dim, queries_ + begin * kv_.head_dim, 1, R, keys_ + p * NR, KEYS, 0, acc);
          for (int r = 0; r < R; r++) {
            store(scores_ + (begin + r) * KEYS + p * NR, acc[r][0]);
            store(scores_ + (begin + r) * KEYS + p * NR + LANES, acc[r][1]);
          }
        });
  }

  // Turn a row's scores into weights against its running maximum; what it does not see weighs nothing.
  void weigh(int64_t row, int64_t tile, int64_t from, int64_t to) {
    float* scores = scores_ + row * KEYS;
    int64_t position = span_.position + begin_ + row / group_;
    int64_t low = first_key(position) - tile, high = position + 1 - tile;
    low = low > from ? low : from;
    high = high < to ? high : to;
    for (int64_t i = 0; i < low && i < KEYS; i++) scores[i] = -__builtin_inff();
    for (int64_t i = high > 0 ? high : 0; i < KEYS; i++) scores[i] = -__builtin_inff();
    if (high <= low) {
      std::memset(scores, 0, KEYS * sizeof(float));
      return;
    }
    vf top = load(scores);
    for (int64_t i = LANES; i < KEYS; i += LANES) top = max(top, load(scores + i));
    float most = largest(top) > most_[row] ? largest(top) : most_[row];
    vf added = {};
    for (int64_t i = 0; i < KEYS; i += LANES) {
      vf weight = exp(load(scores + i) - most);
      store(scores + i, weight);
      added += weight;
    }
    if (most != most_[row]) {
      float shrink = exp(splat(most_[row] - most))[0];
      total_[row] *= shrink;
      for (int64_t d = 0; d < wide_; d += LANES) store(sums_ + row * wide_ + d, load(sums_ + row * wide_ + d) * shrink);
    }
    total_[row] += sum(added);
    most_[row] = most;
  }

  void add_values(int64_t tile, int64_t from, int64_t to) {
    if constexpr (EXTRA<K> > 0) {
      // The values' scales go into the weights: a multiplication a key and row instead of one a value.
      for (int64_t key = from; key < to; key++) {
        float scale = scale_of(value_at(tile + key), kv_.v_head_dim);
        for (int64_t row = 0; row < rows_; row++) scores_[row * KEYS + key] *= scale;
      }
    }
    if (rows_ > 2 * MR || kv_.v_head_dim % NR) {
      for (int64_t key = from; key < to; key++) {
        const K* row = value_at(tile + key);
        for (int64_t d = 0; d < wide_; d += LANES)
          store(values_ + key * wide_ + d, load_some(row + d, kv_.v_head_dim - d));
      }
      return add_run(values_ + from * wide_, wide_, from, to - from);
    }
    // For a few rows the copy would cost more than it saves: page by page, where keys lie one behind the other.
    for (int64_t key = from; key < to;) {
      int64_t end = kv_.tables.page_end(tile + key) - tile;
      end = end < to ? end : to;
      add_run(value_at(tile + key), kv_.v_head_dim + EXTRA<K>, key, end - key);
      key = end;
    }
  }

  template <typename V>
  void add_run(const V* values, int64_t stride, int64_t key, int64_t keys) {
    for (int64_t p = 0; p < wide_; p += NR)
      for (int64_t begin = 0; begin < rows_; begin += MR)
        with_rows(rows_ - begin < MR ? rows_ - begin : MR, [&](auto count) {
          constexpr int R = decltype(count)::value;
          vf acc[R][2];
          float* at = sums_ + begin * wide_ + p;
          for (int r = 0; r < R; r++) {
            acc[r][0] = load(at + r * wide_);
            acc[r][1] = load(at + r * wide_ + LANES);
          }
          multiply<R, 1>(keys, scores_ + begin * KEYS + key, KEYS, 1, values + p, stride, 0, acc);
          for (int r = 0; r < R; r++) {
            store(at + r * wide_, acc[r][0]);
            store(at + r * wide_ + LANES, acc[r][1]);
          }
        });
  }

  const Paged<K>& kv_;
  const Span& span_;
  int64_t head_, begin_, tokens_, group_, rows_, wide_;
  float *queries_, *scores_, *sums_, *most_, *total_, *keys_, *values_, *row_;
};

// q is (rows, q_row) with the heads in front, out (rows, heads, v_head_dim).
template <typename T, typename K>
static void attention(const Paged<K>& kv, const T* q, int64_t q_row, T* out) {
  struct Task {
    const Span* span;
    int64_t begin, tokens;
  };
  int64_t step = TILE_ROWS / (kv.heads / kv.kv_heads);
  if (step < 1) step = 1;
  std::vector<Task> tasks;
  for (const Span* span = kv.tables.spans; span < kv.tables.spans + kv.tables.count; span++)
    for (int64_t begin = 0; begin < span->count; begin += step)
      tasks.push_back({span, begin, span->count - begin < step ? span->count - begin : step});
  parallel(int64_t(tasks.size()) * kv.kv_heads, [&](int64_t i) {
    const Task& task = tasks[i / kv.kv_heads];
    Tile<K> tile(kv, *task.span, i % kv.kv_heads, task.begin, task.tokens);
    tile.run(q + task.span->row * q_row, q_row, out + task.span->row * kv.heads * kv.v_head_dim);
  });
}
