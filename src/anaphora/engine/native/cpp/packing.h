// Weights as Python gives them, packed into strips. Included by api.cpp.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "layout.h"
#include "team.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace anaphora {
namespace {

// Zeroed memory; the large ones on huge pages where the system has them, since a step reads all weights.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t size_bytes) {
    const size_t alignment = size_bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    start_ = std::calloc(1, size_bytes + alignment);
    if (!start_) throw std::bad_alloc();
    aligned_ = (void*)round_up((int64_t)start_, alignment);
#if defined(__linux__)
    if (alignment == HUGE_PAGE) madvise(aligned_, size_bytes, MADV_HUGEPAGE);
#endif
  }
  Memory(Memory&& other) noexcept { *this = static_cast<Memory&&>(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(start_, other.start_);
    std::swap(aligned_, other.aligned_);
    return *this;
  }
  ~Memory() { std::free(start_); }
  template <typename T>
  T* as() const {
    return (T*)aligned_;
  }

 private:
  static constexpr size_t HUGE_PAGE = 2 << 20;
  void *start_ = nullptr, *aligned_ = nullptr;
};

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A matrix [outputs, inputs] as Python gives it. The same fields as Stored in library.py.
struct Stored {
  const void* numbers;            // float32; or, where there are scales, int8
  const float *scales, *offsets;  // [outputs, inputs / block_inputs]: number * scale + offset. No offsets: 0
  int32_t block_inputs;

  Format format() const {
    if (!scales) return Format::BF16;
    return offsets ? Format::NIBBLES : block_inputs == 16 ? Format::BYTES_OF_16 : Format::BYTES_OF_32;
  }
  Stored row(int64_t number, int64_t num_inputs) const {
    const int64_t block = scales ? number * (num_inputs / block_inputs) : 0;
    return {(const char*)numbers + number * num_inputs * (scales ? sizeof(int8_t) : sizeof(float)),
            scales ? scales + block : nullptr, offsets ? offsets + block : nullptr, block_inputs};
  }
};

struct LayerPointers {  // the same fields as LayerPointers in library.py: vectors of float32, null where there is none
  Stored q, k, v, o, gate, up, down;  // those that share a matrix are stored alike
  const float *attention_norm, *mlp_norm, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;
};

struct Packing {
  Matrix matrix;
  const std::vector<Stored>& rows;
  int64_t num_inputs;
};

void pack_bf16(const float* row, int64_t num_inputs, uint32_t* to) {
  for (int64_t i = 0; i < num_inputs; ++i) ((uint16_t*)(to + i / 2 * STRIP))[i % 2] = to_bf16(row[i]);
}

// As GGUF's Q8_0 is made: what was Q8_0 before comes out as it was.
void pack_rounded(const float* row, int64_t num_inputs, ByteBlock<16>* block, int64_t lane) {
  for (int64_t start = 0; start < num_inputs; start += 32, ++block) {
    const int64_t stop = start + 32 < num_inputs ? start + 32 : num_inputs;
    float largest = 0;
    for (int64_t i = start; i < stop; ++i) largest = std::fmax(largest, std::fabs(row[i]));
    const float scale = block->scales[lane] = largest / 127;
    for (int64_t i = start; i < stop && scale > 0; ++i)
      block->numbers[(i - start) / 2][lane][i % 2] = (int8_t)std::lrintf(row[i] / scale);
  }
}

template <typename Block>
void pack_numbers(const Stored& row, int64_t num_inputs, Block* block, int64_t lane) {
  const int8_t* pair = (const int8_t*)row.numbers;
  for (int64_t b = 0; b < num_inputs / (2 * Block::NUM_PAIRS); ++b, ++block) {
    block->scales[lane] = row.scales[b];
    if constexpr (std::is_same_v<Block, NibbleBlock>) block->offsets[lane] = row.offsets[b];
    for (int64_t k = 0; k < Block::NUM_PAIRS; ++k, pair += 2) {
      if constexpr (std::is_same_v<Block, NibbleBlock>)
        block->numbers[k][lane] = (uint8_t)(pair[0] | pair[1] << 4);
      else
        std::memcpy(block->numbers[k][lane], pair, 2);
    }
  }
}

void pack_strips(void* context, Team& team) {
  const Packing& packing = *(const Packing*)context;
  const Matrix& matrix = packing.matrix;
  for (int64_t s = team.claim(); s < matrix.num_strips; s = team.claim()) {
    for (int64_t lane = 0; lane < STRIP && s * STRIP + lane < (int64_t)packing.rows.size(); ++lane) {
      const Stored& row = packing.rows[s * STRIP + lane];
      if (!row.numbers) continue;
      switch (matrix.format) {
        case Format::BF16:
          pack_bf16((const float*)row.numbers, packing.num_inputs, matrix.strip<uint32_t>(s) + lane);
          break;
        case Format::BYTES_OF_32:
          if (row.scales)
            pack_numbers(row, packing.num_inputs, matrix.strip<ByteBlock<16>>(s), lane);
          else
            pack_rounded((const float*)row.numbers, packing.num_inputs, matrix.strip<ByteBlock<16>>(s), lane);
          break;
        case Format::BYTES_OF_16:
          pack_numbers(row, packing.num_inputs, matrix.strip<ByteBlock<8>>(s), lane);
          break;
        case Format::NIBBLES:
          pack_numbers(row, packing.num_inputs, matrix.strip<NibbleBlock>(s), lane);
          break;
      }
    }
  }
}

int64_t strip_bytes_of(Format format, int64_t num_pairs) {
  switch (format) {
    case Format::BF16: return num_pairs * STRIP * sizeof(uint32_t);
    case Format::BYTES_OF_32: return ceil_div(num_pairs, 16) * sizeof(ByteBlock<16>);
    case Format::BYTES_OF_16: return ceil_div(num_pairs, 8) * sizeof(ByteBlock<8>);
    case Format::NIBBLES: return ceil_div(num_pairs, 16) * sizeof(NibbleBlock);
  }
  return 0;
}

}  // namespace
}  // namespace anaphora
