// The path for any processor: pairs taken apart into floats; four floats at a time, which every compiler knows.
#define ANAPHORA_PATH portable
#define ANAPHORA_WIDTH 4
#include "vector.h"

namespace anaphora::portable {

constexpr int MAX_ROWS = 2, TILES_AT_ONCE = 1;
constexpr bool UNPACKS_BF16 = true;  // for many rows: few registers, so a weight would be taken apart often
typedef float Operand;

static INLINE Ints widen(const uint8_t* from) { return Ints{from[0], from[1], from[2], from[3]}; }
static INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }

#include "pairs_as_floats.h"

}  // namespace anaphora::portable

#include "forward.h"

const anaphora::Path anaphora::portable_path = {"portable", sizeof(anaphora::portable::Operand), anaphora::portable::forward};
