// Decode attention of one token over 2-bit pages and exact rows: one block for each (work item, KV head).
//
// The block's warps take tiles of the item in turn, each with a softmax of its own, and meet in shared memory at the
// end. Written for mma.sync of sm_80 and later; compiled at run time, so nothing is included and every constant comes
// as a macro:
//
//   HEAD_DIM     64 or 128, keys and values alike
//   GROUP        1..8 query heads of a KV head
//   VECTOR_KEYS  1: keys are indices into a codebook of int8 words; 0: 2-bit codes
//   SOFTCAP      1: logits are capped by a tanh
//   WARPS        warps of a block
//   BLOCKS       blocks that must fit on a multiprocessor
//
// Operands are swapped: S^T = K Q^T and O^T = V^T P^T, so that tokens, then channels, lie on the 16 rows of the matrix
// instruction and query heads on its 8 columns. Codes stay integers: one AND cuts a plane of four 2-bit fields out of
// a word, which then is an int8 operand. q and p keep their precision as two 8-bit digits, high and low:
//
//   GROUP <= 4   column 2 i holds the high digit of head i, column 2 i + 1 the low one
//   GROUP >= 5   column i is head i, and the product is issued once for each digit
//
// In every fragment a lane is (row, quad) = (lane / 4, lane % 4). Accumulators give a lane two columns, 2 quad and
// 2 quad + 1, of the rows `row` and `row + 8`: with one column pair a head, a lane owns head `quad`, otherwise the
// heads 2 quad and 2 quad + 1.

// ------------------------------------------------------------------------------------------- the end of every item

extern __shared__ uint4 shared[];

// Where a lane puts its outputs for the merge: `put(k, channel, o)` for its k-th head.
template <int COUNT>
struct Outputs {
  float* rows[COUNT];
  float weight[COUNT];
  __device__ __forceinline__ void put(int k, int channel, float o) const {
    if (rows[k]) rows[k][channel] = o * weight[k];
  }
};

// Merge the warps of the block and write the item's rows of one KV head. `place` puts all outputs of a lane.
template <int COUNT, class Place>
__device__ __forceinline__ void finish(const Arguments& a, int item, int kv_head, const int (&head)[COUNT],
                                       const float (&m)[COUNT], const float (&l)[COUNT], Place place) {
  const int warp = threadIdx.x / 32;
  float2* states = reinterpret_cast<float2*>(shared);                  // [WARPS][8]
  float* rows = reinterpret_cast<float*>(states + WARPS * 8);          // [WARPS][GROUP][ROW_FLOATS]
  __syncthreads();  // a codebook may still be read
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
    if (threadIdx.x % 32 < 4) states[warp * 8 + head[k]] = make_float2(m[k], l[k]);
  __syncthreads();
  Outputs<COUNT> outputs;
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    float top = MASKED;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, states[w * 8 + head[k]].x);
    outputs.weight[k] = exp2_fast(m[k] - top);
    outputs.rows[k] = head[k] < GROUP ? rows + (warp * GROUP + head[k]) * ROW_FLOATS : nullptr;
  }
  place(outputs);
  __syncthreads();
  const u64 first = ((u64)item * a.heads + kv_head) * GROUP;
  for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += 32 * WARPS) {
    const int h = i / HEAD_DIM, channel = i % HEAD_DIM;
    float top = MASKED, sum = 0.f, o = 0.f;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, states[w * 8 + h].x);
    for (int w = 0; w < WARPS; ++w) {
      const float2 s = states[w * 8 + h];
      sum += s.y * exp2_fast(s.x - top);
      o += rows[(w * GROUP + h) * ROW_FLOATS + channel];
    }
    const bool seen = sum > 0.f;
    a.out[(first + h) * HEAD_DIM + channel] = seen ? o / sum : 0.f;
    if (channel == 0) a.state[first + h] = seen ? make_float2(top, sum) : make_float2(MASKED, 0.f);
  }
}

// ------------------------------------------------------------------------------------------------------ coded tokens

// First channel of the four that half `r` of matrix step `s` takes, of a lane.
__device__ __forceinline__ int query_channel(int s, int r, int quad) {
  if (VECTOR_KEYS) return 4 * (2 * STEPS * quad + 2 * s + r);
  return KEY_WORDS == 2 ? 8 * quad + 4 * r + HEAD_DIM / 4 * s : 4 * quad + HEAD_DIM / 4 * (2 * s + r);
}

struct Queries {
  u32 digits[LANE_HEADS][STEPS][2];  // B fragments: the lane's own digit, or high and low
  float unit[LANE_HEADS];            // log2 logit of one integer unit
  float sum[LANE_HEADS];             // sum of q, in integer units
  float offset[LANE_HEADS];
};

__device__ __forceinline__ void load_queries(Queries& f, const Arguments& a, int request, int kv_head) {
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int head = min(LANE_HEADS == 1 ? row / 2 : row, GROUP - 1);  // columns to spare repeat the last head
  const u64 first = ((u64)request * a.heads + kv_head) * GROUP;
  float x[STEPS][2][4], top = 0.f, sum = 0.f;
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int channel = query_channel(s, r, quad);
      const uint2 four = __ldg(reinterpret_cast<const uint2*>(a.q + (first + head) * HEAD_DIM + channel));
      const float scale = VECTOR_KEYS ? __ldg(a.book_scale + kv_head * (HEAD_DIM / 4) + channel / 4) : 1.f;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const u32 pair = k < 2 ? four.x : four.y;
        x[s][r][k] = __uint_as_float(k % 2 ? pair & 0xffff0000u : pair << 16) * scale;
        top = fmaxf(top, fabsf(x[s][r][k]));
        sum += x[s][r][k];
      }
    }
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    sum += __shfl_xor_sync(~0u, sum, step);
  }
  top = fmaxf(top, 1e-20f);
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Odd planes are cut out two bits higher: their codes count four times.
      const int plane = KEY_WORDS == 2 ? s : r;
      const float units = Q_UNITS / top * (!VECTOR_KEYS && plane % 2 ? 0.25f : 1.f);
      u32 high = 0, low = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int whole = __float2int_rn(x[s][r][k] * units), upper = (whole + 128) >> 8;
        high |= (u32)(upper & 255) << (8 * k);
        low |= (u32)((whole - (upper << 8)) & 255) << (8 * k);
      }
      if (LANE_HEADS == 1) {
        f.digits[0][s][r] = row % 2 ? low : high;
      } else {
        f.digits[0][s][r] = high;
        f.digits[LANE_HEADS - 1][s][r] = low;
      }
    }
#pragma unroll
  for (int k = 0; k < LANE_HEADS; ++k) {
    const int owned = LANE_HEADS == 1 ? quad : 2 * quad + k, source = LANE_HEADS == 1 ? 8 * owned : 4 * owned;
    f.unit[k] = __shfl_sync(~0u, top, source) * (a.scale / Q_UNITS);
    f.sum[k] = __shfl_sync(~0u, sum * (Q_UNITS / top), source);
    f.offset[k] = SOFTCAP && a.offset && owned < GROUP ? __ldg(a.offset + first + owned) * a.scale : 0.f;
  }
}

#if VECTOR_KEYS
// Shared bytes of the codebook, at a multiple of TABLE_BYTES, so that an index is or-ed into an address.
__device__ __forceinline__ u32 book_address() {
  return ((u32)__cvta_generic_to_shared(shared) + TABLE_BYTES - 1) / TABLE_BYTES * TABLE_BYTES;
}

__device__ __forceinline__ void fill_codebook(const Arguments& a, int kv_head) {
  const uint4* source = a.codebook + (u64)kv_head * (BOOK_WORDS / 4);
  for (int i = threadIdx.x; i < BOOK_WORDS / 4; i += 32 * WARPS) {
    const uint4 w = __ldg(source + i);
    asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" :: "r"(book_address() + 16 * i), "r"(w.x), "r"(w.y), "r"(w.z),
                 "r"(w.w) : "memory");
  }
  __syncthreads();
}

// The word of the index in byte BYTE of a lane's code words: four coordinates, as the matrix instruction takes them.
template <int BYTE>
__device__ __forceinline__ u32 word_of(const u32 (&codes)[KEY_WORDS], u32 tables) {
  constexpr int SHIFT = 8 * (BYTE % 4) - 2;
  const u32 w = codes[BYTE / 4];
  const u32 index = (SHIFT < 0 ? w << 2 : w >> (SHIFT < 0 ? 0 : SHIFT)) & (255u * 4);
  return load_shared<BYTE * TABLE_BYTES>(index | tables);
}
#endif

// Matrix step STEP of 16 tokens: `even` and `odd` are the code words of the lane's two tokens.
template <int STEP>
__device__ __forceinline__ void key_step(int (*d)[4], const u32 (&even)[KEY_WORDS], const u32 (&odd)[KEY_WORDS],
                                         const Queries& f, u32 tables) {
#if VECTOR_KEYS
  const u32 a0 = word_of<2 * STEP>(even, tables), a1 = word_of<2 * STEP>(odd, tables);
  const u32 a2 = word_of<2 * STEP + 1>(even, tables), a3 = word_of<2 * STEP + 1>(odd, tables);
#else
  constexpr int SHIFT = KEY_WORDS == 2 ? 4 * (STEP / 2) : 4 * STEP;
  constexpr u32 FIRST = KEY_WORDS == 2 && STEP % 2 ? 0x0c0c0c0cu : 0x03030303u;
  constexpr u32 SECOND = KEY_WORDS == 2 ? FIRST : 0x0c0c0c0cu;
  const u32 a0 = even[0] >> SHIFT & FIRST, a1 = odd[0] >> SHIFT & FIRST;
  const u32 a2 = even[KEY_WORDS - 1] >> SHIFT & SECOND, a3 = odd[KEY_WORDS - 1] >> SHIFT & SECOND;
#endif
#pragma unroll
  for (int k = 0; k < LANE_HEADS; ++k) mma_codes(d[k], a0, a1, a2, a3, f.digits[k][STEP]);
}

static_assert(WARPS <= 4, "a lead has the first pages of four warps");

// Tokens of a tile of 64: product i gives a lane the tokens 16 (row / 2) + 2 (row % 2) + 4 i and the one after it, so
// that a transposed pair of rows is four neighbours: the four tokens of one word of values.
__device__ void coded(const Arguments& a, int item, int kv_head, const int4& work, const int4& lead) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quad = lane % 4;
  const int request = work.x, first_token = 16 * (row / 2) + 2 * (row % 2);
  const int low = a.spans[2 * request].x, high = a.spans[2 * request].y;
  const int* table = a.table + (u64)request * a.table_stride;
  const int end = work.w / PAGE;
  int tile = work.z / PAGE + warp;
  // Where a lane reads in a page block.
  const u32 keys = first_token * (HEAD_DIM / 4) + 4 * KEY_WORDS * quad;
  const u32 values = KEY_BYTES + row * PAGE + 16 * quad;
  const u32 affine = KEY_BYTES + VALUE_BYTES + 8 * first_token;
  auto block = [&](int page) { return a.pages + (u64)((u32)page * (u32)a.heads + (u32)kv_head) * BLOCK_BYTES; };

  u32 key[4][2][KEY_WORDS];
  uint4 word[4], value[VALUE_LOADS];
  auto load_keys = [&](const u8* at) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) load_key(key[i][e], at + keys + (4 * i + e) * (HEAD_DIM / 4));
  };
  auto load_words = [&](const u8* at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = load16(at + affine + 32 * i);
  };
  auto load_values = [&](const u8* at) {
#pragma unroll
    for (int i = 0; i < VALUE_LOADS; ++i) value[i] = load16(at + values + 8 * PAGE * i);
  };
  Queries f;
  if (QUERIES_FIRST) load_queries(f, a, request, kv_head);
  const u8* next = a.pages;
  int page = 0;
  if (tile < end) {
    next = block(warp < 2 ? (warp ? lead.y : lead.x) : warp == 2 ? lead.z : lead.w);
    load_keys(next);
    load_words(next);
    load_values(next);
    if (tile + WARPS < end) page = __ldg(table + tile + WARPS);
  }

  // While the first tile is on its way.
  if (!QUERIES_FIRST) load_queries(f, a, request, kv_head);
#if VECTOR_KEYS
  fill_codebook(a, kv_head);
  const u32 tables = book_address() + 2 * STEPS * TABLE_BYTES * quad;
#else
  const u32 tables = 0;
#endif
  float m[LANE_HEADS], l[LANE_HEADS], bias[LANE_HEADS], o[4][VALUE_LOADS / 2][2][LANE_HEADS];
#pragma unroll
  for (int k = 0; k < LANE_HEADS; ++k) {
    m[k] = MASKED, l[k] = 0.f, bias[k] = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < VALUE_LOADS / 2; ++c) o[j][c][0][k] = o[j][c][1][k] = 0.f;
  }

  for (; tile < end; tile += WARPS) {
    // Registers are refilled for the next tile as soon as this one has read them.
    const bool more = tile + WARPS < end;
    int d[4][LANE_HEADS][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < LANE_HEADS; ++k) d[i][k][0] = d[i][k][1] = d[i][k][2] = d[i][k][3] = 0;
      key_step<0>(d[i], key[i][0], key[i][1], f, tables);
      key_step<1>(d[i], key[i][0], key[i][1], f, tables);
      if constexpr (STEPS == 4) {
        key_step<STEPS - 2>(d[i], key[i][0], key[i][1], f, tables);
        key_step<STEPS - 1>(d[i], key[i][0], key[i][1], f, tables);
      }
    }
    if (more) {
      next = block(page);
      if (!WIDE) load_keys(next);
      if (tile + 2 * WARPS < end) page = __ldg(table + tile + 2 * WARPS);
    }

    // A word that is not seen may be anything, NaN included.
    const bool border = __builtin_expect(tile * PAGE < low || tile * PAGE + PAGE > high, 0);
    auto unseen = [&](int i, int e) {
      const int token = tile * PAGE + first_token + 4 * i + e;
      return token < low || token >= high;
    };
    if (border) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (unseen(i, 0)) word[i].x = word[i].y = 0u;
        if (unseen(i, 1)) word[i].z = word[i].w = 0u;
      }
    }

    // Logits: without a softcap in units of `unit`, which the exponent takes back in one multiply-add.
    float x[4][2][LANE_HEADS], top[LANE_HEADS], scale_max = SMALLEST;
    u32 value_word[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 key_word = e ? word[i].z : word[i].x;
        value_word[i][e] = e ? word[i].w : word[i].y;
        const float scale = low_half(key_word);
#pragma unroll
        for (int k = 0; k < LANE_HEADS; ++k) {
          const int whole = LANE_HEADS == 1 ? d[i][0][2 * e] * 256 + d[i][0][2 * e + 1]
                                            : d[i][0][2 * e + k] * 256 + d[i][LANE_HEADS - 1][2 * e + k];
          float y = (float)whole * scale;
          if (!VECTOR_KEYS) y = fmaf((float)whole, scale, high_half(key_word) * f.sum[k]);
          if (SOFTCAP) y = capped(fmaf(y, f.unit[k], f.offset[k]), a.cap);
          x[i][e][k] = y;
        }
        scale_max = fmaxf(scale_max, low_half(value_word[i][e]));
      }
    if (border) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int k = 0; k < LANE_HEADS; ++k) x[i][e][k] = unseen(i, e) ? MASKED : x[i][e][k];
    }
#pragma unroll
    for (int k = 0; k < LANE_HEADS; ++k) {
      top[k] = LOWEST;
#pragma unroll
      for (int i = 0; i < 4; ++i) top[k] = fmaxf(top[k], fmaxf(x[i][0][k], x[i][1][k]));
    }
    scale_max = row_max(scale_max);
    float keep[LANE_HEADS], take[LANE_HEADS], rate[LANE_HEADS];
    bool rescale = false;
#pragma unroll
    for (int k = 0; k < LANE_HEADS; ++k) {
      rate[k] = SOFTCAP ? 1.f : f.unit[k];
      top[k] = row_max(top[k]) * rate[k];
      const float grown = fmaxf(m[k], top[k]);
      keep[k] = exp2_fast(m[k] - grown), take[k] = exp2_fast(top[k] - grown);
      m[k] = grown;
      rescale |= keep[k] != 1.f;
    }

    // p relative to the tile's own maximum: long flat tails keep their bits.
    u32 p[LANE_HEADS][4];
    const float units = __fdividef(P_UNITS, scale_max);
    float mass[LANE_HEADS], shift[LANE_HEADS];
#pragma unroll
    for (int k = 0; k < LANE_HEADS; ++k) mass[k] = shift[k] = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 digits[2][LANE_HEADS];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float step = low_half(value_word[i][e]) * units, base = high_half(value_word[i][e]);
#pragma unroll
        for (int k = 0; k < LANE_HEADS; ++k) {
          const float weight = exp2_fast(fmaf(x[i][e][k], rate[k], -top[k]));
          mass[k] += weight;
          shift[k] = fmaf(weight, base, shift[k]);
          digits[e][k] = __float_as_uint(fmaf(weight, step, 8388608.f));  // the integer in the low mantissa bits
        }
      }
      if constexpr (LANE_HEADS == 1) {
        p[0][i] = transposed(__byte_perm(digits[0][0], digits[1][0], 0x4051));
      } else {
        const u32 even = __byte_perm(digits[0][0], digits[1][0], 0x4051);
        const u32 odd = __byte_perm(digits[0][LANE_HEADS - 1], digits[1][LANE_HEADS - 1], 0x4051);
        p[0][i] = transposed(__byte_perm(even, odd, 0x5410));
        p[LANE_HEADS - 1][i] = transposed(__byte_perm(even, odd, 0x7632));
      }
    }
    if (more && !WIDE) load_words(next);
    float gain[LANE_HEADS];
#pragma unroll
    for (int k = 0; k < LANE_HEADS; ++k) {
      l[k] = fmaf(l[k], keep[k], take[k] * mass[k]);
      bias[k] = fmaf(bias[k], keep[k], take[k] * shift[k]);
      gain[k] = take[k] * scale_max * (1.f / P_UNITS);
    }
    if (__any_sync(~0u, rescale)) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int c = 0; c < VALUE_LOADS / 2; ++c)
#pragma unroll
          for (int k = 0; k < LANE_HEADS; ++k) o[j][c][0][k] *= keep[k], o[j][c][1][k] *= keep[k];
    }

    // Plane j of the values carries a factor of 4^j, divided out at the very end.
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < VALUE_LOADS / 2; ++c) {
        const u32 mask = 0x03030303u << (2 * j);
        const uint4 up = value[2 * c], down = value[2 * c + 1];
        int sum[LANE_HEADS][4];
#pragma unroll
        for (int k = 0; k < LANE_HEADS; ++k) {
          sum[k][0] = sum[k][1] = sum[k][2] = sum[k][3] = 0;
          mma_values(sum[k], up.x & mask, down.x & mask, up.y & mask, down.y & mask, p[k][0], p[k][1]);
          mma_values(sum[k], up.z & mask, down.z & mask, up.w & mask, down.w & mask, p[k][2], p[k][3]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int k = 0; k < LANE_HEADS; ++k) {
            const int whole = LANE_HEADS == 1 ? sum[0][2 * r] * 256 + sum[0][2 * r + 1]
                                              : sum[0][2 * r + k] * 256 + sum[LANE_HEADS - 1][2 * r + k];
            o[j][c][r][k] = fmaf((float)whole, gain[k], o[j][c][r][k]);
          }
      }
    if (more && WIDE) load_keys(next);
    if (more && WIDE) load_words(next);
    if (more) load_values(next);
  }

  int head[LANE_HEADS];
#pragma unroll
  for (int k = 0; k < LANE_HEADS; ++k) {
    head[k] = LANE_HEADS == 1 ? quad : 2 * quad + k;
    l[k] = row_sum(l[k]);
    bias[k] = row_sum(bias[k]);
  }
  finish(a, item, kv_head, head, m, l, [&](const Outputs<LANE_HEADS>& outputs) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < VALUE_LOADS / 2; ++c)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int k = 0; k < LANE_HEADS; ++k) {
            const float plane = j == 0 ? 1.f : j == 1 ? 0.25f : j == 2 ? 0.0625f : 0.015625f;
            outputs.put(k, HEAD_DIM / 4 * j + 16 * c + 8 * r + row, fmaf(o[j][c][r][k], plane, bias[k]));
          }
  });
}

// ------------------------------------------------------------------------------------------------------- exact rows

// Tiles of 16 rows. The order of channels inside a dot product and of channels along the rows of O^T is free, so every
// lane loads runs of 8 channels: of the keys of tokens `row` and `row + 8`, and of the values of the four tokens
// 2 quad, 2 quad + 1, 2 quad + 8, 2 quad + 9. p is a sum of two bfloat16.
__device__ void exact(const Arguments& a, int item, int kv_head, const int4& work, const int4& lead) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quad = lane % 4;
  const int request = work.x;
  const int sink_lo = lead.x, sink_n = lead.y, recent_lo = lead.z, slot = lead.w;
  const u32 buffer = (u32)slot * (u32)a.heads + (u32)kv_head;
  const u32 sink = buffer * (u32)a.sink_rows + (u32)sink_lo, ring = buffer * (u32)a.ring_rows;
  const int ring_lo = recent_lo % a.ring_rows;
  // Where the row of a virtual index begins in its tier's buffers; past the end, the last row stands in.
  auto place = [&](int index, const bf16* sinks, const bf16* rings) {
    const int x = min(index, work.w - 1), around = ring_lo + x - sink_n;
    const bool in_sink = x < sink_n;
    const u32 at = in_sink ? sink + (u32)x : ring + (u32)(around >= a.ring_rows ? around - a.ring_rows : around);
    return (in_sink ? sinks : rings) + (u64)at * HEAD_DIM;
  };
  const u64 first = ((u64)request * a.heads + kv_head) * GROUP;
  const uint4* queries = reinterpret_cast<const uint4*>(a.q + (first + min(row, GROUP - 1)) * HEAD_DIM);

  constexpr int RUNS = HEAD_DIM / 64, TILES = HEAD_DIM / 16;
  float m[2] = {MASKED, MASKED}, l[2] = {0.f, 0.f}, offset[2] = {0.f, 0.f}, o[TILES][4];
  int head[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    head[k] = 2 * quad + k;
    if (SOFTCAP && a.offset && head[k] < GROUP) offset[k] = __ldg(a.offset + first + head[k]) * a.scale;
  }
#pragma unroll
  for (int c = 0; c < TILES; ++c) o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0.f;

  uint4 key[2][HEAD_DIM / 32], value[4][RUNS];
  auto load_keys = [&](int start) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bf16* from = place(start + row + 8 * e, a.sink_k, a.ring_k) + 8 * quad;
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 32; ++j) key[e][j] = load16(from + 32 * j);
    }
  };
  auto load_values = [&](int start) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bf16* from = place(start + 2 * quad + e % 2 + 8 * (e / 2), a.sink_v, a.ring_v) + 8 * row;
#pragma unroll
      for (int j = 0; j < RUNS; ++j) value[e][j] = load16(from + 64 * j);
    }
  };
  for (int start = work.z + 16 * warp; start < work.w; start += 16 * WARPS) {
    load_keys(start);
    load_values(start);
    float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 32; ++j) {
      const uint4 q = reload16(queries + 4 * j + quad);
      mma_exact(s, key[0][j].x, key[1][j].x, key[0][j].y, key[1][j].y, q.x, q.y);
      mma_exact(s, key[0][j].z, key[1][j].z, key[0][j].w, key[1][j].w, q.z, q.w);
    }
    // s[2 e + k]: token row + 8 e, head 2 quad + k.
    float p[4];
    bool rescale = false;
    float keep[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float top = LOWEST;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float y = fmaf(s[2 * e + k], a.scale, offset[k]);
        if (SOFTCAP) y = capped(y, a.cap);
        if (start + row + 8 * e >= work.w) y = MASKED;
        p[2 * e + k] = y;
        top = fmaxf(top, y);
      }
      const float grown = fmaxf(m[k], row_max(top));
      keep[k] = exp2_fast(m[k] - grown);
      rescale |= keep[k] != 1.f;
      m[k] = grown;
      l[k] *= keep[k];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        p[2 * e + k] = exp2_fast(p[2 * e + k] - grown);
        l[k] += p[2 * e + k];
      }
    }
    u32 high[2], rest[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const u32 even = __float_as_uint(p[2 * e]), odd = __float_as_uint(p[2 * e + 1]);
      high[e] = transposed(__byte_perm(even, odd, 0x7632));
      rest[e] = transposed(pack_bf16(p[2 * e] - __uint_as_float(even & 0xffff0000u),
                                     p[2 * e + 1] - __uint_as_float(odd & 0xffff0000u)));
    }
    if (__any_sync(~0u, rescale)) {
#pragma unroll
      for (int c = 0; c < TILES; ++c) o[c][0] *= keep[0], o[c][1] *= keep[1], o[c][2] *= keep[0], o[c][3] *= keep[1];
    }
    // Channel c of a run of tokens 2 quad and 2 quad + 1 becomes one register: the two halves of words of both rows.
#pragma unroll
    for (int c = 0; c < TILES; ++c) {
      const u32 pick = c % 2 ? 0x7632 : 0x5410;
      auto run = [&](int e, int r) {
        const uint4 v = value[e][RUNS == 2 ? r : 0];
        const int w = c / 2 + (RUNS == 2 ? 0 : 2 * r);
        return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
      };
      const u32 a0 = __byte_perm(run(0, 0), run(1, 0), pick), a1 = __byte_perm(run(0, 1), run(1, 1), pick);
      const u32 a2 = __byte_perm(run(2, 0), run(3, 0), pick), a3 = __byte_perm(run(2, 1), run(3, 1), pick);
      mma_exact(o[c], a0, a1, a2, a3, high[0], high[1]);
      mma_exact(o[c], a0, a1, a2, a3, rest[0], rest[1]);
    }
  }
  l[0] = row_sum(l[0]);
  l[1] = row_sum(l[1]);
  finish(a, item, kv_head, head, m, l, [&](const Outputs<2>& outputs) {
#pragma unroll
    for (int c = 0; c < TILES; ++c)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int k = 0; k < 2; ++k) outputs.put(k, 8 * row + c + (RUNS == 2 ? 64 : 4) * r, o[c][2 * r + k]);
  });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    decode(float* out, float2* state, const bf16* q, const u8* pages, const uint4* codebook, const float* book_scale,
           const float* offset, const bf16* sink_k, const bf16* sink_v, const bf16* ring_k, const bf16* ring_v,
           const int* table, const int4* spans, const int4* items, const int4* leads, int heads, int table_stride,
           int sink_rows, int ring_rows, float scale, float cap) {
  const Arguments a{out,    state,  q,     pages, codebook, book_scale, offset,       sink_k,    sink_v,    ring_k,
                    ring_v, table,  spans, items, heads,    table_stride, sink_rows, ring_rows, scale,     cap};
  const int item = blockIdx.x / heads, kv_head = blockIdx.x % heads;
#if __CUDA_ARCH__ >= 900
  // What ran before has to be over first; then the merge may come onto the device behind the last blocks.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int4 work = items[item], lead = leads[item];
  if (work.z >= work.w) return;
  if (work.y) {
    exact(a, item, kv_head, work, lead);
  } else {
    coded(a, item, kv_head, work, lead);
  }
}
