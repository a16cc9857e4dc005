// Types, constants and instructions of decode.cu, which follows this text.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

constexpr int PAGE = 64;
constexpr int KEY_BYTES = PAGE * HEAD_DIM / 4;
constexpr int VALUE_BYTES = PAGE * HEAD_DIM / 4;
constexpr int BLOCK_BYTES = KEY_BYTES + VALUE_BYTES + 8 * PAGE;

constexpr int LANE_HEADS = GROUP <= 4 ? 1 : 2;     // heads of a lane in the coded branch
constexpr bool WIDE = LANE_HEADS == 2 && HEAD_DIM == 128;  // too many outputs to load everything early
constexpr bool QUERIES_FIRST = VECTOR_KEYS || WIDE;             // before the first tile, for lack of registers
constexpr int STEPS = HEAD_DIM / 32;               // matrix steps over the channels of a key
constexpr int KEY_WORDS = HEAD_DIM / 64;           // code words of a key that a lane holds
constexpr int VALUE_LOADS = HEAD_DIM / 32;         // 16-byte loads of a tile of values
constexpr int BOOK_WORDS = HEAD_DIM / 4 * 256;     // words of a codebook
constexpr int TABLE_BYTES = 1024;                  // of one group's words
constexpr int ROW_FLOATS = HEAD_DIM + 8;           // padded, so that the four quads hit different banks

constexpr float MASKED = -1e30f;     // logit of a token that is not seen
constexpr float LOWEST = -1e29f;     // where a running maximum starts: a masked token then weighs exactly 0
constexpr float Q_UNITS = 32512.f;   // largest |q| of a head, in integer units: 127 * 256
constexpr float P_UNITS = 65280.f;   // largest p s_v of a tile: 255 * 256
constexpr float SMALLEST = 5.9604645e-8f;  // least positive float16: keeps a tile without scales free of 0 / 0

struct Arguments {
  float* out;                // [items, Hq, d] normalised partial outputs
  float2* state;             // [items, Hq] maximum in log2 units, sum
  const bf16* q;             // [batch, Hq, d] mapped queries
  const u8* pages;           // [pages, H, BLOCK_BYTES]
  const uint4* codebook;     // [H, d / 4, 256] words of four int8 coordinates
  const float* book_scale;   // [H, d / 4]
  const float* offset;       // [batch, Hq] q . mu, read under a softcap only; null is zeros
  const bf16* sink_k;        // [slots, H, sink_rows, d]
  const bf16* sink_v;
  const bf16* ring_k;        // [slots, H, ring_rows, d]
  const bf16* ring_v;
  const int* table;          // [batch, table_stride] pages
  const int4* spans;         // [batch, 2]: coded_lo, coded_hi, sink_lo, sink_n; recent_lo, recent_n, n, slot
  const int4* items;         // [items]: request, kind, start, stop
  int heads;
  int table_stride;
  int sink_rows;
  int ring_rows;
  float scale;               // of q . r, in log2 units; under a softcap 2 log2(e) scaling / cap
  float cap;                 // cap log2(e)
};

// ---------------------------------------------------------------------------------------------------- instructions

__device__ __forceinline__ void mma_codes(int* d, u32 a0, u32 a1, u32 a2, u32 a3, const u32* b) {
#if VECTOR_KEYS
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#endif
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_values(int* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_exact(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transpose an 8 x 8 matrix of 16-bit elements: a lane gives row `row`, columns 2 quad and 2 quad + 1.
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float low_half(u32 pair) {
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(pair));
  return y;
}

__device__ __forceinline__ float high_half(u32 pair) {
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(pair));
  return y;
}

// Two floats as bfloat16, `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// Volatile, so that loads stay where they are written: ahead of the work that hides them.
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// The same for what is read again and again, by a loop that has no registers to keep it.
__device__ __forceinline__ uint4 reload16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ void load_key(u32 (&w)[KEY_WORDS], const u8* p) {
  if constexpr (KEY_WORDS == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(w[0]), "=r"(w[KEY_WORDS - 1]) : "l"(p));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0,[%1];" : "=r"(w[0]) : "l"(p));
  }
}

template <int OFFSET>
__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0,[%1+%2];" : "=r"(v) : "r"(address), "n"(OFFSET));
  return v;
}

__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int step = 4; step < 32; step <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int step = 4; step < 32; step <<= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// cap tanh(y / cap) in log2 units, of x = 2 log2(e) y / cap. tanh.approx has 11 bits only.
__device__ __forceinline__ float capped(float x, float cap) {
  return cap - __fdividef(2.f * cap, 1.f + exp2_fast(x));
}
