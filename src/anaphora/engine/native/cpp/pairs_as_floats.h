// How a path without bf16 dot products multiplies: inside its namespace. Operands are floats.

struct Pairs {
  F32 even, odd;
};

static INLINE Pairs load_pairs(const uint32_t* from) {
  Pairs pairs;
  EACH_PART {
    Ints bits;
    std::memcpy(&bits, from + i * WIDTH, sizeof bits);
    pairs.even.part[i] = (Floats)(bits << 16);
    pairs.odd.part[i] = (Floats)(bits & (int32_t)0xffff0000);
  }
  return pairs;
}

static INLINE Pairs make_pairs(F32 even, F32 odd) { return {even, odd}; }

// acc + even * x[0], then + odd * x[1].
static INLINE F32 dot(F32 acc, const Pairs& pairs, const Operand* x) {
  const Floats even = broadcast(x[0]), odd = broadcast(x[1]);
  EACH_PART acc.part[i] = multiply_add(pairs.odd.part[i], odd, multiply_add(pairs.even.part[i], even, acc.part[i]));
  return acc;
}

static INLINE void store_operands(Operand* to, F32 v) { store(to, v); }
