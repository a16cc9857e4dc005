// Rows of keys or values on their way to the frame, for uniform.cuh, write_keys.cu and write_uniform.cu, which follow.
//
// A block takes 32 tokens a team of TEAM warps. What it computes of a token does not depend on TEAM.
//
// In every fragment a lane is (row, quad) = (lane / 4, lane % 4). A lane sees four tokens of its team's 32, item i:
// 16 (i / 2) + 8 (i % 2) + row.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

constexpr int TILES = HEAD_DIM / 8;           // 8 channels, two groups
constexpr int STEPS = HEAD_DIM / 16;          // matrix steps of the frame product
constexpr int CHUNKS = HEAD_DIM / 8;          // 16 bytes of a row
constexpr int TOKENS = 32;                    // of a team
constexpr int TEAMS = WARPS / TEAM;
constexpr int TILE_WORDS = 132;               // 4 items, 8 rows, 4 quads; padded, so that a row is read without conflicts
constexpr int TEAM_WORDS = TILES * TILE_WORDS;
constexpr float FULL = 65504.f;               // of float16

extern __shared__ uint4 shared[];

// Where the rows of one side come from and go to.
struct Side {
  const bf16* x;         // [tokens, heads, d], any strides
  const uint4* map;      // fragments of A: [heads, TILES, STEPS / 2, 32]
  const float* shift;    // [heads, d]
  bf16* sinks;           // [slots, heads, sink_rows, d]
  bf16* ring;            // [slots, heads, ring_rows, d]
  bf16* out;             // [tokens, heads, d] or null
  long long token_stride;
  long long head_stride;
};

// What both sides share.
struct Batch {
  u8* pages;             // [pages, heads, block_bytes]
  const long long* slots;
  const int* positions;
  const int* requests;
  const int* buffers;
  const int* lengths;
  u64* clamped;
  int tokens;
  int heads;
  int sink_rows;
  int ring_rows;
  int block_bytes;
  int affine_bytes;      // where the affine words of a block begin
  int words;             // affine words of a token
  int windows;
};

// ---------------------------------------------------------------------------------------------------- instructions

__device__ __forceinline__ void mma_frame(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

// 16 bytes to shared memory, zeros unless `given`.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool given) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" :: "r"(to), "l"(from), "r"(given ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// Two floats as bfloat16 or float16, `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ float low_half(u32 pair) {
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(pair));
  return y;
}

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// -------------------------------------------------------------------------------------------------------- the frame

// Bring the rows of a team to shared memory: 16-byte chunk c of row t lies at chunk c ^ (t % 8).
__device__ __forceinline__ void load_rows(const Side& a, int tokens, uint4* rows, int first, int head, int member) {
  const bf16* keys = a.x + (u64)head * a.head_stride;
  const bool aligned = ((u64)a.x | 2 * a.token_stride | 2 * a.head_stride) % 16 == 0;
  for (int i = 32 * member + threadIdx.x % 32; i < TOKENS * CHUNKS; i += 32 * TEAM) {
    const int t = i / CHUNKS, chunk = i % CHUNKS;
    const bool given = first + t < tokens;
    const bf16* from = given ? keys + (u64)(first + t) * a.token_stride + 8 * chunk : a.x;
    uint4* to = rows + t * CHUNKS + (chunk ^ (t % 8));
    if (aligned) {
      copy16(shared_address(to), from, given);
    } else {
      u32 w[4] = {0, 0, 0, 0};
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (given) w[e / 2] |= (u32)from[e] << (e % 2 * 16);
      *to = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// r of the team's tokens, from keys in shared memory to the same place: tile, item, row, quad.
__device__ __forceinline__ void frame(const Side& a, u32* rows, int head, int member) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  u32 keys[2][STEPS][4];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int t = 16 * m + lane % 16, chunk = 2 * s + lane / 16;
      load_matrices(keys[m][s], shared_address(rows) + 16 * (t * CHUNKS + (chunk ^ (t % 8))));
    }
  __syncthreads();
  const uint4* map = a.map + (u64)head * (TILES * STEPS / 2 * 32) + lane;
  const float* shift = a.shift + head * HEAD_DIM + 2 * quad;
#pragma unroll 2
  for (int n = member; n < TILES; n += TEAM) {
    uint4 b[STEPS / 2];
#pragma unroll
    for (int s = 0; s < STEPS / 2; ++s) b[s] = __ldg(map + (n * (STEPS / 2) + s) * 32);
    const float2 mean = __ldg(reinterpret_cast<const float2*>(shift + 8 * n));
    float d[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
    for (int s = 0; s < STEPS / 2; ++s)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma_frame(d[m], keys[m][2 * s], b[s].x, b[s].y);
        mma_frame(d[m], keys[m][2 * s + 1], b[s].z, b[s].w);
      }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      rows[n * TILE_WORDS + 32 * i + lane] =
          pack_bf16(d[i / 2][i % 2 * 2] - mean.x, d[i / 2][i % 2 * 2 + 1] - mean.y);
  }
}

// Copy rows of the team to where `place(token)` says, 16 bytes a lane; null: nowhere.
template <class Place>
__device__ __forceinline__ void keep(const u32* rows, int member, Place place) {
  for (int i = 32 * member + threadIdx.x % 32; i < TOKENS * TILES; i += 32 * TEAM) {
    const int t = i / TILES, n = i % TILES;
    bf16* to = place(t);
    if (to) reinterpret_cast<uint4*>(to)[n] = *reinterpret_cast<const uint4*>(rows + n * TILE_WORDS + 4 * t);
  }
}

// Store exact rows of a team: all of them to `out`, those of the windows to sinks and rings. `token` and `slot` are of
// the team's token 8 quad + row.
__device__ __forceinline__ void keep_rows(const Side& a, const Batch& b, const u32* rows, int member, int head, int first,
                                          int token, long long slot) {
  if (a.out)
    keep(rows, member, [&](int t) {
      return first + t < b.tokens ? a.out + ((u64)(first + t) * b.heads + head) * HEAD_DIM : nullptr;
    });
  if (!b.windows) return;
  int request = 0, position = 0, length = 0;
  if (slot >= 0) {
    request = __ldg(b.requests + token), position = __ldg(b.positions + token);
    length = __ldg(b.lengths + request);
  }
  const bool sink = slot >= 0 && position < b.sink_rows;
  const bool recent = slot >= 0 && position >= length - b.ring_rows;
  // Of a long chunk most tokens are in neither.
  if (!__any_sync(~0u, sink || recent)) return;
  const u64 buffer = slot >= 0 ? (u64)__ldg(b.buffers + request) * b.heads + head : 0;
  bf16* to_sink = sink ? a.sinks + (buffer * b.sink_rows + position) * HEAD_DIM : nullptr;
  bf16* to_ring = recent ? a.ring + (buffer * b.ring_rows + position % b.ring_rows) * HEAD_DIM : nullptr;
  auto of = [&](bf16* to, int t) {
    return reinterpret_cast<bf16*>(__shfl_sync(~0u, reinterpret_cast<u64>(to), t % 8 * 4 + t / 8));
  };
  keep(rows, member, [&](int t) { return of(to_sink, t); });
  keep(rows, member, [&](int t) { return of(to_ring, t); });
}
