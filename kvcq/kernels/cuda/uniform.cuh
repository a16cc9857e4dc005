// Rows in uniform 2-bit codes with one scale; follows rows.cuh.
//
//   r = bf16(x A - mu A),  r' = clamp(r, -t, t),  t = sorted(|r|)[rank]
//   s = fp16((max r' - min r') / 3),  b = fp16(min r'),  code = clamp(floor((r' - b) / s + 1/2), 0, 3), 0 where s is 0
//
// Codes come out as those of the codec for the same r: t is found among the bits of magnitudes, from the highest that may
// differ, and the quotient is the correctly rounded one.
//
// SHARE lanes code a token, 8 lanes apart; each has a quarter of every bit plane that its share of the tiles makes.

constexpr int SHARE = TILES / 4;              // a lane has the tiles share + SHARE * plane
constexpr int ROUND = 32 / SHARE;             // tokens that a warp codes at once
constexpr int BYTES = HEAD_DIM / 4;           // of the codes of a token
constexpr u32 MAGNITUDES = 0x7fff7fffu;

// 1 for every half of a below that of b, else 0, as float16.
__device__ __forceinline__ u32 below(u32 a, u32 b) {
  u32 y;
  asm("set.lt.f16x2.f16x2 %0,%1,%2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
  u32 y;
  asm("add.rn.f16x2 %0,%1,%2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 max_bf16(u32 a, u32 b) {
  u32 y;
  asm("max.bf16x2 %0,%1,%2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 min_bf16(u32 a, u32 b) {
  u32 y;
  asm("min.bf16x2 %0,%1,%2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// x + 2^23 rounded down: the whole part of 0 <= x < 2^22 is in the lowest bits.
__device__ __forceinline__ u32 whole(float x) {
  u32 y;
  asm("add.rm.f32 %0,%1,0f4b000000;" : "=r"(y) : "f"(x));
  return y;
}

// The sum or extreme of a token over the lanes that share it.
template <class Join>
__device__ __forceinline__ u32 joined(u32 x, Join join) {
#pragma unroll
  for (int step = ROUND; step < 32; step <<= 1) x = join(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// How many magnitudes of a token are below a number, given twice.
__device__ __forceinline__ float smaller(const u32 (&size)[16], u32 number) {
  u32 even = below(size[0], number), odd = below(size[1], number);
#pragma unroll
  for (int i = 2; i < 16; i += 2) {
    even = add_halves(even, below(size[i], number));
    odd = add_halves(odd, below(size[i + 1], number));
  }
  const u32 count = joined(add_halves(even, odd), add_halves);
  return low_half(add_halves(count, count >> 16));
}

// How a number becomes a code.
struct Levels {
  float bias, step, inverse;
  float lowest, highest;  // of the quotient and a half, clipped
  __device__ __forceinline__ float place(float x) const {
    const float a = x - bias, near = __fmul_rn(a, inverse);
    // One step of Newton's with fused operations is exact: a float16 divisor has no significand of ones.
    return __fadd_rn(fmaf(fmaf(-near, step, a), inverse, near), 0.5f);
  }
  // Clipping before is the same as clipping after, for no step here turns an order around.
  __device__ __forceinline__ u32 code(float x) const { return whole(fminf(fmaxf(place(x), lowest), highest)); }
};

__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Code 32 / SHARE tokens of a team, from token `base` on.
__device__ __forceinline__ void code_round(const Batch& b, const u32* rows, int first, int base, int head, int rank,
                                           bool values) {
  const int lane = threadIdx.x % 32, share = lane / ROUND, t = base + lane % ROUND, token = first + t;
  const long long slot = token < b.tokens ? __ldg(b.slots + token) : -1;
  uint4 pairs[4];
#pragma unroll
  for (int p = 0; p < 4; ++p)
    pairs[p] = *reinterpret_cast<const uint4*>(rows + (share + SHARE * p) * TILE_WORDS + 4 * t);
  u32 most = word_of(pairs[0], 0), least = most, size[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const u32 pair = word_of(pairs[i / 4], i % 4);
    most = max_bf16(most, pair), least = min_bf16(least, pair);
    size[i] = pair & MAGNITUDES;
  }
  most = joined(most, max_bf16), least = joined(least, min_bf16);
  const float top = fmaxf(low_bf16(most), high_bf16(most)), low = fminf(low_bf16(least), high_bf16(least));
  float bound = fmaxf(fabsf(top), fabsf(low));
  if (rank < HEAD_DIM - 1) {
    // Magnitudes of bfloat16 are ordered like the float16 numbers of the same bits. t is seldom below an eighth of the
    // largest: then the nine lowest bits above that floor are left.
    u32 found = __float_as_uint(bound) >> 16 & 0x7f80;
    found = max(found, 0x100u) - 0x100u;
    found |= found << 16;
    const bool near = smaller(size, found) <= rank;
    u32 span = 0x01000100u;
    if (__any_sync(~0u, !near)) found = 0, span = 0x40004000u;
#pragma unroll 1
    for (; span; span = span >> 1 & MAGNITUDES)
      if (const u32 tried = found + span; smaller(size, tried) <= rank) found = tried;
    bound = low_bf16(found);
  }
  if (slot >= 0 && bound > FULL) {
    u64 large = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) large += (low_bf16(size[i]) > FULL) + (high_bf16(size[i]) > FULL);
    atomicAdd(b.clamped, large);
  }
  bound = fminf(bound, FULL);
  const float start = fminf(fmaxf(low, -bound), bound), end = fminf(fmaxf(top, -bound), bound);
  const u32 affine = pack_half(fminf((end - start) / 3.f, FULL), start);
  Levels levels;
  const float step = low_half(affine);
  levels.step = step > 0.f ? step : 1.f;
  levels.inverse = 1.f / levels.step;
  levels.bias = low_half(affine >> 16);
  levels.lowest = step > 0.f ? fminf(fmaxf(levels.place(-bound), 0.f), 3.5f) : 0.5f;
  levels.highest = step > 0.f ? fminf(fmaxf(levels.place(bound), 0.f), 3.5f) : 0.5f;

  // Pair i of a tile has the channels 2 i and 2 i + 1 of its eight: two bytes, a tile of each plane.
  u32 bytes[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 even = 0, odd = 0;
#pragma unroll
    for (int p = 3; p >= 0; --p) {
      const u32 pair = word_of(pairs[p], i);
      even = even * 4 + levels.code(low_bf16(pair));
      odd = odd * 4 + levels.code(high_bf16(pair));
    }
    bytes[2 * i] = even, bytes[2 * i + 1] = odd;
  }
  if (slot < 0) return;
  u8* block = b.pages + ((u64)(slot >> 6) * b.heads + head) * b.block_bytes;
  const int place = (int)slot & 63;
  if (values) {
    u8* columns = block + b.affine_bytes - 64 * BYTES + (8 * share) * 64 + place;
#pragma unroll
    for (int i = 0; i < 8; ++i) columns[64 * i] = bytes[i];
  } else {
    // The lowest bytes of four words.
    const u32 lower = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
    const u32 upper = __byte_perm(__byte_perm(bytes[4], bytes[5], 0x0040), __byte_perm(bytes[6], bytes[7], 0x0040), 0x5410);
    *reinterpret_cast<uint2*>(block + place * BYTES + 8 * share) = make_uint2(lower, upper);
  }
  if (share == 0)
    for (int g = 0; g < b.words; ++g)
      reinterpret_cast<u32*>(block + b.affine_bytes)[place * 2 * b.words + 2 * g + values] = affine;
}

// What a block does: rows of its tile of tokens of a KV head.
__device__ __forceinline__ void write_uniform_rows(const Side& a, const Batch& b, int tile, int head, int rank, bool values) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quad = lane % 4;
  const int member = warp % TEAM, first = (tile * TEAMS + warp / TEAM) * TOKENS;
  u32* rows = reinterpret_cast<u32*>(shared) + warp / TEAM * TEAM_WORDS;
  load_rows(a, b.tokens, reinterpret_cast<uint4*>(rows), first, head, member);
  commit();
  wait<0>();
  __syncthreads();
  frame(a, rows, head, member);
  __syncthreads();
  const int token = first + 8 * quad + row;
  keep_rows(a, b, rows, member, head, first, token, token < b.tokens ? __ldg(b.slots + token) : -1);
#pragma unroll 1
  for (int base = member * ROUND; base < TOKENS; base += TEAM * ROUND) code_round(b, rows, first, base, head, rank, values);
}
