// Products of rows of operands with tiles of pairs. Included by forward.h.
//
// An output is ((0 + pair 0) + pair 1) + ... in one lane of one accumulator, whatever the number of rows and tiles that
// a call takes at once: so it cannot depend on its neighbours.

namespace anaphora::ANAPHORA_PATH {
namespace {

// acc[r][t] += row r of x @ tile t, whose pair k is tile_at(k, t).
template <int R, int T, typename TileAt>
INLINE void accumulate(F32 (&acc)[R][T], TileAt tile_at, int num_pairs, const Operand* x, int64_t x_stride) {
  const Operand* row[R];
  for (int r = 0; r < R; ++r) row[r] = x + r * x_stride;
  for (int64_t k = 0; k < num_pairs; ++k) {
    Pairs tile[T];
    for (int t = 0; t < T; ++t) tile[t] = tile_at(k, t);
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) acc[r][t] = dot(acc[r][t], tile[t], row[r] + 2 * k);
  }
}

template <int R, int T>
INLINE void clear(F32 (&acc)[R][T]) {
  for (auto& row : acc)
    for (F32& v : row) v = splat(0);
}

// The two tiles of a strip of weights, however they are kept. What lies `ahead` (0: nothing) is fetched into the cache
// on the way.
struct Bf16Strip {
  const uint32_t* pairs;
  int64_t ahead;
  INLINE Pairs tile(int64_t k, int t) const {
    const uint32_t* from = pairs + k * STRIP + t * LANES;
    if (ahead) __builtin_prefetch(from + ahead, 0, 2);
    return load_pairs(from);
  }
};

struct Q8Strip {
  const Q8Block* blocks;
  int64_t ahead;
  INLINE Pairs tile(int64_t k, int t) const {
    typedef int16_t Bytes __attribute__((vector_size(2 * WIDTH)));
    const Q8Block* block = blocks + (uint64_t)k / BLOCK_PAIRS;
    const int8_t(*from)[2] = block->weights[(uint64_t)k % BLOCK_PAIRS] + t * LANES;
    if (ahead) __builtin_prefetch((const char*)from + ahead * (int64_t)sizeof(Q8Block), 0, 2);
    const F32 scale = load(block->scales + t * LANES);
    F32 even, odd;
    EACH_PART {
      Bytes bytes;
      std::memcpy(&bytes, from + i * WIDTH, sizeof bytes);
      const Ints pair = __builtin_convertvector(bytes, Ints);
      even.part[i] = __builtin_convertvector(pair << 24 >> 24, Floats) * scale.part[i];
      odd.part[i] = __builtin_convertvector(pair >> 8, Floats) * scale.part[i];
    }
    return make_pairs(even, odd);
  }
};

struct UnpackedStrip {
  const Pairs* pairs;  // [num_pairs][2]
  INLINE Pairs tile(int64_t k, int t) const { return pairs[2 * k + t]; }
};

// Both halves of a strip for R rows: out [R][32].
template <int R, typename Strip>
__attribute__((noinline)) void strip_product(Strip strip, int num_pairs, const Operand* x, int64_t x_stride, float* out) {
  for (int first = 0; first < 2; first += TILES_AT_ONCE) {
    F32 acc[R][TILES_AT_ONCE];
    clear(acc);
    accumulate(acc, [&](int64_t k, int t) __attribute__((always_inline)) { return strip.tile(k, first + t); }, num_pairs,
               x, x_stride);
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < TILES_AT_ONCE; ++t) store(out + r * STRIP + (first + t) * LANES, acc[r][t]);
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

// epilogue(row, left half, right half) for each of the rows first .. stop - 1; the last ones meet `last`, which is the
// same strip.
template <typename Strip, typename LastStrip, typename Epilogue>
void multiply(Strip strip, LastStrip last, int num_pairs, const Operand* x, int64_t x_stride, int64_t first,
              int64_t stop, Epilogue epilogue) {
  for (int64_t row = first; row < stop; row += MAX_ROWS) {
    const int n = (int)(stop - row < MAX_ROWS ? stop - row : MAX_ROWS);
    alignas(64) float out[MAX_ROWS * STRIP];
    with_rows(n, [&](auto rows) {
      constexpr int R = decltype(rows)::count;
      if (row + n == stop)
        strip_product<R>(last, num_pairs, x + row * x_stride, x_stride, out);
      else
        strip_product<R>(strip, num_pairs, x + row * x_stride, x_stride, out);
    });
    for (int r = 0; r < n; ++r) epilogue(row + r, load(out + r * STRIP), load(out + r * STRIP + LANES));
  }
}

// One strip of a matrix for some rows. While the last ones meet it, the strip `next` places on comes in from memory.
template <typename Epilogue>
void multiply(const Matrix& matrix, int64_t number, int64_t next, const Operand* x, int64_t x_stride, int64_t first,
              int64_t stop, Epilogue epilogue) {
  constexpr int64_t MAX_UNPACKED = 512 << 10;  // bytes of a thread's stack
  const int num_pairs = matrix.num_pairs;
  if (!matrix.blocks) {
    const Bf16Strip strip{matrix.strip(number), 0}, last{strip.pairs, next * num_pairs * STRIP};
    return multiply(strip, last, num_pairs, x, x_stride, first, stop, epilogue);
  }
  const Q8Strip strip{matrix.q8_strip(number), 0}, last{strip.blocks, next * matrix.num_blocks()};
  const int64_t size = 2 * num_pairs * (int64_t)sizeof(Pairs);
  if (stop - first <= MAX_ROWS || size > MAX_UNPACKED)
    return multiply(strip, last, num_pairs, x, x_stride, first, stop, epilogue);
  // For many rows its numbers are made once.
  Pairs unpacked[2 * num_pairs];
  for (int64_t k = 0; k < num_pairs; ++k)
    for (int t = 0; t < 2; ++t) unpacked[2 * k + t] = last.tile(k, t);
  multiply(UnpackedStrip{unpacked}, UnpackedStrip{unpacked}, num_pairs, x, x_stride, first, stop, epilogue);
}

}  // namespace
}  // namespace anaphora::ANAPHORA_PATH
