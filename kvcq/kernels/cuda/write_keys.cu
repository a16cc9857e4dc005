// Write keys in vector codes, and in the same launch values in uniform ones: one block for each (tile of tokens, KV head,
// part of the groups of channels), and one for each tile and KV head of values. The two keep different units busy, so
// that they run side by side: STRIPE blocks of keys, then as many of values, and so on.
//
// Written for mma.sync of sm_80 and later; compiled at run time, so nothing is included and every constant comes as a
// macro:
//
//   HEAD_DIM     64 or 128
//   WARPS        warps of a block
//   TEAM         warps that share 32 tokens: 1 (every warp has 32 tokens of its own, for long prompts) or WARPS; with 1
//                there is one part
//   BLOCKS       blocks that must fit on a multiprocessor
//
// What a team computes of a token does not depend on TEAM: codes are the same for one token and for thousands.
//
// 1. r = bf16(k A - mu A), rho = fp16(sqrt(mean r^2)).
// 2. Every word c of a group of 4 channels scores <c - c', r> - rho s (|c|^2 - |c'|^2) / 2, c' the word nearest to zero,
//    s the scale of the words. A matrix instruction of 8 terms gives it: 4 coordinates, and rho times the constant of
//    the word in 3 float16 pieces. r and rho are scaled by a power of two such that the root mean square is in [8, 16):
//    float16 then holds them. No term is rounded but in sums.
// 3. The best word is not worse than c', which scores 0, and scores at most 508 |r| < 2^17 - 2^10. With 513 added, as
//    the accumulators start, the upper 6 bits of every number that may be the largest are the same: they make room for
//    an index. Words are compared in runs of 4 that one lane holds: two instructions for the largest of a run, then
//    64 number + index of the run, and integers have a maximum of three.
// 4. The 4 words of the best run score again in float32: <c, r> - |c|^2 (rho s / 2). Ties take the lowest index.
//
// A lane owns the item of its quad.

constexpr int GROUPS = HEAD_DIM / 4;
constexpr int FRAGMENTS = 256;                // 16-byte words of a group's table: operands of the search,
constexpr int WORDS = 64;                     // and the 256 codewords, four int8 coordinates each
constexpr int TABLE = FRAGMENTS + WORDS;
constexpr int STAGES = 3;
constexpr bool STREAM = TEAM == 1;            // tables come through shared memory, where all warps read the same

constexpr int FLOOR = 0x44000000;             // bits of 512: what is smaller counts as that
constexpr int START = 0x44004000;             // bits of 513: so that c' itself is more than the floor
constexpr float SMALLEST = 1e-8f;

// Scores of 8 words and 16 tokens, plus 513, as bits.
__device__ __forceinline__ void mma_score(int (&d)[4], u32 a0, u32 a1, u32 b) {
  float x, y, z, w;
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"
      : "=f"(x), "=f"(y), "=f"(z), "=f"(w)
      : "r"(a0), "r"(a1), "r"(b), "f"(__int_as_float(START)));
  d[0] = __float_as_int(x), d[1] = __float_as_int(y), d[2] = __float_as_int(z), d[3] = __float_as_int(w);
}

// ------------------------------------------------------------------------------------------------------- the search

// What a lane knows of its tokens.
struct Items {
  float scale[4];   // of r, a power of two; 0 where rho is 0
  u32 rho[4];       // rho times it, in both halves
  float half;       // rho / 2 of the token that the lane owns
  u32 mask;         // 0 where that rho is 0: the codec then takes the word nearest to zero
};

// 64 times what the largest of a run is, without its upper 6 bits, plus an index: of equals the first run is largest.
template <int INDEX>
__device__ __forceinline__ u32 keyed(int most, u32 unit) {
  u32 key;
  // A product, for the multiply-add units have time. The compiler would make a shift and an addition of it.
  asm("mad.lo.u32 %0,%1,%2,%3;" : "=r"(key) : "r"(most), "r"(unit), "n"(60 - 4 * INDEX));
  return key;
}

// Score 32 words, of which a lane gets two runs of four, for its four tokens.
template <int STEP>
__device__ __forceinline__ void compare(u32 (&best)[4], const u32 (&x)[4], const uint4& b, u32 unit) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    int d[4][4];
    mma_score(d[0], x[2 * m], x[2 * m + 1], b.x);
    mma_score(d[1], x[2 * m], x[2 * m + 1], b.y);
    mma_score(d[2], x[2 * m], x[2 * m + 1], b.z);
    mma_score(d[3], x[2 * m], x[2 * m + 1], b.w);
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int first = max(max(max(d[0][e], d[0][e + 1]), d[1][e]), max(d[1][e + 1], FLOOR));
      const int second = max(max(max(d[2][e], d[2][e + 1]), d[3][e]), max(d[3][e + 1], FLOOR));
      u32& most = best[2 * m + e / 2];
      most = max(max(most, keyed<2 * STEP>(first, unit)), keyed<2 * STEP + 1>(second, unit));
    }
  }
}

// Byte INDEX of a word whose bytes have 128 added, as a float; conversions of integers are slow.
template <int INDEX>
__device__ __forceinline__ float coordinate(u32 word) {
  return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + INDEX)) - 8388736.f;
}

struct Nearest {
  float score;
  u32 index;
};

// Step 4 for one word.
template <int INDEX>
__device__ __forceinline__ void rescore(Nearest& best, u32 word, const float (&r)[4], float half) {
  const u32 bytes = word ^ 0x80808080u;
  float y = __fmul_rn(coordinate<0>(bytes), r[0]);
  y = fmaf(coordinate<1>(bytes), r[1], y);  // products are exact
  y = fmaf(coordinate<2>(bytes), r[2], y);
  y = fmaf(coordinate<3>(bytes), r[3], y);
  const float norm = __int_as_float(__dp4a((int)word, (int)word, 0x4b000000)) - 8388608.f;
  y = fmaf(-norm, half, y);
  if (INDEX == 0 || y > best.score) best.score = y, best.index = INDEX;
}

__device__ __forceinline__ uint4 entry(const uint4* table, int i) {
  if constexpr (STREAM) return table[i];
  return __ldg(table + i);
}

// The index of the word nearest to a group of the token that the lane owns; all lanes work for all tokens.
__device__ __forceinline__ u32 nearest(const uint4* table, const u32* tile, bool odd, float scale, const Items& items) {
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const u32 unit = 2 * blockDim.x / WARPS;  // 64, which the compiler does not know: see `keyed`
  // Lanes 0, 1 of a quad have the even group of a tile, lanes 2, 3 the odd one; the others bring rho.
  u32 x[4], best[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 pair = tile[32 * i + lane];
    const u32 r = pack_half(low_bf16(pair) * items.scale[i], high_bf16(pair) * items.scale[i]);
    x[i] = (quad >= 2) == odd ? r : items.rho[i];
  }
  compare<0>(best, x, entry(table, lane), unit);
  compare<1>(best, x, entry(table, 32 + lane), unit);
  compare<2>(best, x, entry(table, 64 + lane), unit);
  compare<3>(best, x, entry(table, 96 + lane), unit);
  compare<4>(best, x, entry(table, 128 + lane), unit);
  compare<5>(best, x, entry(table, 160 + lane), unit);
  compare<6>(best, x, entry(table, 192 + lane), unit);
  compare<7>(best, x, entry(table, 224 + lane), unit);
  // Each lane gives away what it does not own. Runs are numbered 4 index + quad.
  const bool upper = quad >= 2, last = quad % 2;
  const u32 own = 3 - quad;
  u32 a = (upper ? best[2] : best[0]) + own, b = (upper ? best[3] : best[1]) + own;
  a = max(a, __shfl_xor_sync(~0u, (upper ? best[0] : best[2]) + own, 2));
  b = max(b, __shfl_xor_sync(~0u, (upper ? best[1] : best[3]) + own, 2));
  const u32 key = max(last ? b : a, __shfl_xor_sync(~0u, last ? a : b, 1));
  const u32 run = 63 - key % 64;
  const uint4 words = entry(table, FRAGMENTS + run);
  const uint2 pairs = *reinterpret_cast<const uint2*>(tile + 32 * quad + 4 * row + 2 * odd);
  const u32 low = pairs.x & items.mask, high = pairs.y & items.mask;
  const float r[4] = {low_bf16(low), high_bf16(low), low_bf16(high), high_bf16(high)};
  const float half = items.half * scale;
  Nearest found;
  rescore<0>(found, words.x, r, half);
  rescore<1>(found, words.y, r, half);
  rescore<2>(found, words.z, r, half);
  rescore<3>(found, words.w, r, half);
  return 4 * run + found.index;
}

__device__ __forceinline__ void load_table(const uint4* tables, uint4* stages, int head, int group) {
  if (group < GROUPS) {
    const uint4* from = tables + (u64)(head * GROUPS + group) * TABLE;
    const u32 to = shared_address(stages + group % STAGES * TABLE);
#pragma unroll
    for (int j = 0; j < TABLE; j += 32 * WARPS)
      if (j + threadIdx.x < TABLE) copy16(to + 16 * (j + threadIdx.x), from + j + threadIdx.x, true);
  }
  commit();
}

__device__ __forceinline__ void write_vector_rows(const Side& a, const Batch& b, const uint4* tables, const float* scales,
                                                  int tile, int head, int part, int parts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quad = lane % 4;
  const int member = warp % TEAM, first = (tile * TEAMS + warp / TEAM) * TOKENS;
  u32* rows = reinterpret_cast<u32*>(shared) + warp / TEAM * TEAM_WORDS;
  uint4* stages = shared + TEAMS * TEAM_WORDS / 4;
  load_rows(a, b.tokens, reinterpret_cast<uint4*>(rows), first, head, member);
  commit();
  if (STREAM) {
    load_table(tables, stages, head, 0);
    load_table(tables, stages, head, 1);
  }
  wait<STREAM ? 2 : 0>();
  __syncthreads();
  frame(a, rows, head, member);
  __syncthreads();

  // The order of these sums is the same for every TEAM.
  float squares[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 pair = rows[n * TILE_WORDS + 32 * i + lane];
      squares[i] = fmaf(low_bf16(pair), low_bf16(pair), squares[i]);
      squares[i] = fmaf(high_bf16(pair), high_bf16(pair), squares[i]);
    }
  Items items;
  u32 stored_rho = 0;
  bool large = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = squares[i];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float size = fmaxf(__fsqrt_rn(sum / HEAD_DIM), SMALLEST);
    const u32 bits = pack_half(fminf(size, FULL), 0.f);
    const float rho = low_half(bits);
    const bool some = rho > 0.f;
    const float scale = __uint_as_float((127 + 3 + 127 - (__float_as_uint(size) >> 23)) << 23);
    items.scale[i] = some ? scale : 0.f;
    items.rho[i] = some ? pack_half(rho * scale, rho * scale) : pack_half(8.f, 8.f);
    if (i == quad) {
      items.half = (some ? rho : 1.f) * 0.5f;
      items.mask = some ? ~0u : 0u;
      stored_rho = bits;
      large = size > FULL;
    }
  }

  const int token = first + 8 * quad + row;
  const long long slot = token < b.tokens ? __ldg(b.slots + token) : -1;
  u8* block = b.pages + ((u64)(slot >> 6) * b.heads + head) * b.block_bytes;
  const int place = (int)slot & 63;
  if (part == 0 && member == 0) {
    if (slot >= 0) {
      u32* affine = reinterpret_cast<u32*>(block + b.affine_bytes) + place * 2 * b.words;
      for (int g = 0; g < b.words; ++g) affine[2 * g] = stored_rho;
      if (large) atomicAdd(b.clamped, 1ull);
    }
  }
  if (part == 0) keep_rows(a, b, rows, member, head, first, token, slot);

  const float* scale = scales + head * GROUPS;
  u8* codes = block + place * GROUPS;
  if (STREAM) {
    u32 four = 0;
#pragma unroll 1
    for (int group = 0; group < GROUPS; ++group) {
      wait<1>();
      __syncthreads();
      load_table(tables, stages, head, group + 2);
      const u32 index = nearest(stages + group % STAGES * TABLE, rows + group / 2 * TILE_WORDS, group % 2,
                                __ldg(scale + group), items);
      four = four >> 8 | index << 24;
      if (group % 4 == 3 && slot >= 0) reinterpret_cast<u32*>(codes)[group / 4] = four;
    }
  } else {
#pragma unroll 1
    for (int group = part * TEAM + member; group < GROUPS; group += parts * TEAM) {
      const u32 index = nearest(tables + (u64)(head * GROUPS + group) * TABLE, rows + group / 2 * TILE_WORDS,
                                group % 2, __ldg(scale + group), items);
      if (slot >= 0) codes[group] = index;
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    write_keys(const bf16* k, const uint4* map_k, const float* shift_k, bf16* sinks_k, bf16* ring_k, bf16* out_k,
               const bf16* v, const uint4* map_v, const float* shift_v, bf16* sinks_v, bf16* ring_v, bf16* out_v,
               const uint4* tables, const float* scales, u8* pages, const long long* slots, const int* positions,
               const int* requests, const int* buffers, const int* lengths, u64* clamped, long long k_token,
               long long k_head, long long v_token, long long v_head, int tokens, int heads, int sink_rows,
               int ring_rows, int block_bytes, int affine_bytes, int words, int windows, int tiles, int parts,
               int with_values, int stripe, int rank) {
  const Batch b{pages, slots, positions, requests, buffers, lengths, clamped, tokens,
                heads, sink_rows, ring_rows, block_bytes, affine_bytes, words, windows};
  const int keys = tiles * heads * parts, most = with_values ? tiles * heads / stripe * stripe : 0;
  int index = blockIdx.x;
  bool values;
  if (index < 2 * most) {
    values = index / stripe % 2;
    index = index / (2 * stripe) * stripe + index % stripe;
  } else {
    index -= most;
    values = index >= keys;
    if (values) index -= keys - most;
  }
  const int tile = index % tiles, head = index / tiles % heads, part = index / tiles / heads;
  if (values) {
    write_uniform_rows({v, map_v, shift_v, sinks_v, ring_v, out_v, v_token, v_head}, b, tile, head, rank, true);
  } else {
    write_vector_rows({k, map_k, shift_k, sinks_k, ring_k, out_k, k_token, k_head}, b, tables, scales, tile, head, part,
                      parts);
  }
}
