// Products of rows of operands with tiles of pairs. Included by forward.h.
//
// An output is ((0 + pair 0) + pair 1) + ... in one lane of one accumulator, whatever the number of rows and tiles that
// a call takes at once: so it cannot depend on its neighbours.

namespace anaphora::ANAPHORA_PATH {
namespace {

// acc[r][t] += row r of x @ tile t. Pair k of tile t is at tiles + k * stride + t * step; what lies `ahead` of it is
// fetched into the cache on the way.
template <int R, int T>
INLINE void accumulate(F32 (&acc)[R][T], const uint32_t* tiles, int64_t stride, int64_t step, int num_pairs,
                       const Operand* x, int64_t x_stride, int64_t ahead = 0) {
  const Operand* row[R];
  for (int r = 0; r < R; ++r) row[r] = x + r * x_stride;
  for (int64_t k = 0; k < num_pairs; ++k) {
    if (ahead)
      for (int t = 0; t < T; ++t) __builtin_prefetch(tiles + ahead + k * stride + t * step, 0, 2);
    Pairs tile[T];
    for (int t = 0; t < T; ++t) tile[t] = load_pairs(tiles + k * stride + t * step);
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) acc[r][t] = dot(acc[r][t], tile[t], row[r] + 2 * k);
  }
}

template <int R, int T>
INLINE void clear(F32 (&acc)[R][T]) {
  for (auto& row : acc)
    for (F32& v : row) v = splat(0);
}

// Both halves of a strip for R rows: out [R][32].
template <int R>
__attribute__((noinline)) void strip_product(const uint32_t* strip, int num_pairs, const Operand* x, int64_t x_stride,
                                             int64_t ahead, float* out) {
  for (int t = 0; t < 2; t += TILES_AT_ONCE) {
    F32 acc[R][TILES_AT_ONCE];
    clear(acc);
    accumulate(acc, strip + t * LANES, STRIP, LANES, num_pairs, x, x_stride, ahead);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < TILES_AT_ONCE; ++i) store(out + r * STRIP + (t + i) * LANES, acc[r][i]);
  }
}

template <int N>
struct Number {
  static constexpr int count = N;
};

// Call body(Number<n>) for n rows, 1 <= n <= MAX_ROWS.
template <int N = MAX_ROWS, typename Body>
INLINE void with_rows(int n, Body&& body) {
  if constexpr (N > 1) {
    if (n < N) return with_rows<N - 1>(n, body);
  }
  body(Number<N>{});
}

// epilogue(row, strip, left half, right half) for each of the rows first .. stop - 1 and one strip.
template <typename Epilogue>
void multiply(const Matrix& matrix, int64_t strip, const Operand* x, int64_t x_stride, int64_t first, int64_t stop,
              int64_t next, Epilogue epilogue) {
  for (int64_t row = first; row < stop; row += MAX_ROWS) {
    const int n = (int)(stop - row < MAX_ROWS ? stop - row : MAX_ROWS);
    // While the last rows meet this strip, the one that this thread will probably take next comes in from memory.
    const bool is_last = row + n == stop && next < matrix.num_strips;
    const int64_t ahead = is_last ? matrix.strip(next) - matrix.strip(strip) : 0;
    alignas(64) float out[MAX_ROWS * STRIP];
    with_rows(n, [&](auto rows) {
      strip_product<decltype(rows)::count>(matrix.strip(strip), matrix.num_pairs, x + row * x_stride, x_stride,
                                            ahead, out);
    });
    for (int r = 0; r < n; ++r) epilogue(row + r, strip, load(out + r * STRIP), load(out + r * STRIP + LANES));
  }
}

}  // namespace
}  // namespace anaphora::ANAPHORA_PATH
