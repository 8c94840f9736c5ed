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

constexpr int64_t ROW_CHUNK = 96;  // rows of one work item: their operands stay in the second-level cache

// The two tiles of a strip of weights, however they are kept, and one weight of it.
struct Bf16Strip {
  const uint32_t* pairs;
  INLINE Pairs tile(int64_t k, int t) const {
    return load_pairs(pairs + k * STRIP + t * LANES);
  }
  float weight(int64_t input, int64_t lane) const {
    return from_bf16(pairs[input / 2 * STRIP + lane] >> input % 2 * 16 & 0xffff);
  }
};

// How numbers of few bits become weights: a product of theirs with a scale is exact in float32, so there is one rounding
// at most, that of the sum, fused or not.
template <typename Block>
struct ByteStrip {
  const Block* blocks;
  INLINE Pairs tile(int64_t k, int t) const {
    typedef int16_t Bytes __attribute__((vector_size(2 * WIDTH)));
    const Block& block = blocks[(uint64_t)k / Block::NUM_PAIRS];
    const int8_t(*from)[2] = block.numbers[(uint64_t)k % Block::NUM_PAIRS] + t * LANES;
    const F32 scale = load(block.scales + t * LANES);
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
  float weight(int64_t input, int64_t lane) const {
    const Block& block = blocks[input / 2 / Block::NUM_PAIRS];
    return (float)block.numbers[input / 2 % Block::NUM_PAIRS][lane][input % 2] * block.scales[lane];
  }
};

struct NibbleStrip {
  const NibbleBlock* blocks;
  INLINE Pairs tile(int64_t k, int t) const {
    const NibbleBlock& block = blocks[(uint64_t)k / NibbleBlock::NUM_PAIRS];
    const uint8_t* from = block.numbers[(uint64_t)k % NibbleBlock::NUM_PAIRS] + t * LANES;
    const F32 scale = load(block.scales + t * LANES), offset = load(block.offsets + t * LANES);
    F32 even, odd;
    EACH_PART {
      const Ints pair = widen(from + i * WIDTH);
      even.part[i] = multiply_add(__builtin_convertvector(pair & 15, Floats), scale.part[i], offset.part[i]);
      odd.part[i] = multiply_add(__builtin_convertvector(pair >> 4, Floats), scale.part[i], offset.part[i]);
    }
    return make_pairs(even, odd);
  }
  float weight(int64_t input, int64_t lane) const {
    const NibbleBlock& block = blocks[input / 2 / NibbleBlock::NUM_PAIRS];
    const int number = block.numbers[input / 2 % NibbleBlock::NUM_PAIRS][lane] >> input % 2 * 4 & 15;
    return (float)number * block.scales[lane] + block.offsets[lane];
  }
};

// body(strip) with the strip of that number.
template <typename Body>
INLINE void with_strip(const Matrix& matrix, int64_t number, Body body) {
  switch (matrix.format) {
    case Format::BF16: return body(Bf16Strip{matrix.strip<uint32_t>(number)});
    case Format::BYTES_OF_32: return body(ByteStrip<ByteBlock<16>>{matrix.strip<ByteBlock<16>>(number)});
    case Format::BYTES_OF_16: return body(ByteStrip<ByteBlock<8>>{matrix.strip<ByteBlock<8>>(number)});
    case Format::NIBBLES: return body(NibbleStrip{matrix.strip<NibbleBlock>(number)});
  }
}

// Part of a strip, ready to be multiplied with.
struct UnpackedStrip {
  static constexpr int64_t MAX_PAIRS = 64;  // 16 KB as floats: they stay in the first-level cache
  Pairs pairs[MAX_PAIRS][2];
  INLINE Pairs tile(int64_t k, int t) const { return pairs[k][t]; }
};

// What will be read next: fetched into the cache while something else is computed, a little with each pair.
struct Ahead {
  const char* start;  // null: nothing
  int64_t bytes_a_pair;
  INLINE void fetch(int64_t k) const {
    if (!start) return;
    __builtin_prefetch(start + k * bytes_a_pair, 0, 2);
    __builtin_prefetch(start + k * bytes_a_pair + 64, 0, 2);
  }
};

// Both halves of a strip for R rows: out [R][32] = (if not `is_first`: +=).
template <int R, typename Strip>
__attribute__((noinline)) void product(const Strip& strip, Ahead ahead, int num_pairs, const Operand* x, int64_t x_stride,
                                       float* out, bool is_first = true) {
  for (int first = 0; first < 2; first += TILES_AT_ONCE) {
    F32 acc[R][TILES_AT_ONCE];
    if (is_first)
      clear(acc);
    else
      for (int r = 0; r < R; ++r)
        for (int t = 0; t < TILES_AT_ONCE; ++t) acc[r][t] = load(out + r * STRIP + (first + t) * LANES);
    accumulate(
        acc,
        [&](int64_t k, int t) __attribute__((always_inline)) {
          if (first + t == 0) ahead.fetch(k);
          return strip.tile(k, first + t);
        },
        num_pairs, x, x_stride);
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

// Weights made on the way into the product, once for every MAX rows.
template <int MAX, typename Strip>
void product_of_few(const Strip& strip, Ahead ahead, int num_pairs, const Operand* x, int64_t x_stride, int64_t num_rows,
                    float* out) {
  for (int64_t row = 0; row < num_rows; row += MAX) {
    const bool is_last = num_rows - row <= MAX;
    with_rows<MAX>((int)(is_last ? num_rows - row : MAX), [&](auto rows) {
      product<decltype(rows)::count>(strip, is_last ? ahead : Ahead{}, num_pairs, x + row * x_stride, x_stride,
                                     out + row * STRIP);
    });
  }
}

// Weights made once, some pairs at a time, and met by all rows: the sums wait in memory meanwhile, and go on as they were.
template <typename Strip>
void product_of_many(const Strip& strip, Ahead ahead, int num_pairs, const Operand* x, int64_t x_stride, int64_t num_rows,
                     float* out) {
  UnpackedStrip unpacked;
  for (int64_t pair = 0; pair < num_pairs; pair += UnpackedStrip::MAX_PAIRS) {
    const int count = (int)(num_pairs - pair < UnpackedStrip::MAX_PAIRS ? num_pairs - pair : UnpackedStrip::MAX_PAIRS);
    for (int64_t k = 0; k < count; ++k)
      for (int t = 0; t < 2; ++t) unpacked.pairs[k][t] = strip.tile(pair + k, t);
    Ahead of_part{ahead.start ? ahead.start + pair * ahead.bytes_a_pair : nullptr, ahead.bytes_a_pair};
    for (int64_t row = 0; row < num_rows; row += MAX_ROWS, of_part.start = nullptr)
      with_rows((int)(num_rows - row < MAX_ROWS ? num_rows - row : MAX_ROWS), [&](auto rows) {
        product<decltype(rows)::count>(unpacked, of_part, count, x + row * x_stride + 2 * pair, x_stride,
                                       out + row * STRIP, pair == 0);
      });
  }
}

// One strip of a matrix for the rows first .. stop - 1, at most ROW_CHUNK: epilogue(row, left half, right half) for each.
// On the way, the strip `next` places on (0: none) comes in from memory.
template <typename Epilogue>
void multiply(const Matrix& matrix, int64_t number, int64_t next, const Operand* x, int64_t x_stride, int64_t first,
              int64_t stop, Epilogue epilogue) {
  alignas(64) float out[ROW_CHUNK * STRIP];
  const int64_t count = stop - first;
  const Ahead ahead{next ? matrix.strip<char>(number + next) : nullptr, matrix.strip_bytes / matrix.num_pairs};
  x += first * x_stride;
  with_strip(matrix, number, [&](auto strip) {
    constexpr bool is_bf16 = std::is_same_v<decltype(strip), Bf16Strip>;
    constexpr int MAX_FEW = is_bf16 ? MAX_ROWS : 4 < MAX_ROWS ? 4 : MAX_ROWS;
    if (count <= MAX_FEW || (is_bf16 && !UNPACKS_BF16))
      product_of_few<MAX_FEW>(strip, ahead, matrix.num_pairs, x, x_stride, count, out);
    else
      product_of_many(strip, ahead, matrix.num_pairs, x, x_stride, count, out);
  });
  for (int64_t r = 0; r < count; ++r) epilogue(first + r, load(out + r * STRIP), load(out + r * STRIP + LANES));
}

}  // namespace
}  // namespace anaphora::ANAPHORA_PATH
