// Enough of CUDA to run the sources of write on a CPU: threads of a block are fibers, which hand
// over where a warp or the block meets. Matrix products are summed in double and rounded once.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct Index { int x, y, z; };

static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __launch_bounds__(threads, blocks)

struct Fiber {
  ucontext_t context;
  Index thread;
  bool done;
};

static Index blockIdx, gridDim, blockDim;
static std::vector<Fiber> fibers;
static Fiber* current;
static ucontext_t scheduler;
#define threadIdx current->thread

static int lane() { return threadIdx.x % 32; }
static void hand_over() { swapcontext(&current->context, &scheduler); }

static int waiting;
static long barrier;
static void __syncthreads() {
  const long mine = barrier;
  if (++waiting == (int)fibers.size()) {
    waiting = 0, ++barrier;
  } else {
    while (barrier == mine) hand_over();
  }
}

// What the lanes of a warp give one another; twice, so that nobody overwrites what another still reads.
typedef unsigned Given[8];
struct Meeting {
  Given given[2][32];
  int count;
  long number;
};
static Meeting meetings[32];

template <class T>
static Given* meet(const T& value) {
  Meeting& m = meetings[threadIdx.x / 32];
  const long mine = m.number;
  memcpy(m.given[mine % 2][lane()], &value, sizeof value);
  if (++m.count == 32) {
    m.count = 0, ++m.number;
  } else {
    while (m.number == mine) hand_over();
  }
  return m.given[mine % 2];
}

template <class T>
static T __shfl_sync(unsigned, T x, int from) {
  Given* given = meet(x);
  memcpy(&x, given[from % 32], sizeof x);
  return x;
}
template <class T>
static T __shfl_xor_sync(unsigned mask, T x, int step) { return __shfl_sync(mask, x, lane() ^ step); }
static bool __any_sync(unsigned, bool x) {
  Given* given = meet<unsigned>(x);
  return std::any_of(given, given + 32, [](const Given& g) { return g[0] != 0; });
}

template <class T>
static T __ldg(const T* p) { return *p; }
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static float __int_as_float(int x) { return __uint_as_float(x); }
static int __float_as_int(float x) { return __float_as_uint(x); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsqrt_rn(float x) { return std::sqrt(x); }
static void atomicAdd(unsigned long long* p, unsigned long long x) { *p += x; }
static int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int8_t)(a >> i) * (int8_t)(b >> i);
  return c;
}
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned y = 0;
  for (int i = 0; i < 4; ++i) y |= (both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return y;
}

// --------------------------------------------------------------------- what the sources write in assembly, by its name

alignas(16) static uint4 shared[3072];

static float of_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
static unsigned to_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float of_half(unsigned bits) { const uint16_t low = bits; _Float16 y; memcpy(&y, &low, 2); return (float)y; }
static unsigned to_half(float x) { const _Float16 y = (_Float16)x; uint16_t bits; memcpy(&bits, &y, 2); return bits; }
static unsigned half_of(unsigned pair, int i) { return i % 2 ? pair >> 16 : pair & 65535; }

// One element of a product of `terms` terms, registers of both operands as the lanes gave them.
static double element(Given* given, int row, int column, int terms, int second, float (*read)(unsigned)) {
  double sum = 0;
  for (int k = 0; k < terms; ++k) {
    const unsigned a = given[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
    const unsigned b = given[column * 4 + k % 8 / 2][second + k / 8];
    sum += (double)read(half_of(a, k)) * read(half_of(b, k));
  }
  return sum;
}

static void mma_frame(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  Given* given = meet(mine);
  for (int e = 0; e < 4; ++e)
    d[e] = (float)(d[e] + element(given, lane() / 4 + 8 * (e / 2), lane() % 4 * 2 + e % 2, 16, 4, of_bf16));
}
static void mma_score(int (&d)[4], unsigned a0, unsigned a1, unsigned b) {
  const unsigned mine[3] = {a0, a1, b};
  Given* given = meet(mine);
  for (int e = 0; e < 4; ++e)
    d[e] = __float_as_int((float)(513 + element(given, lane() / 4 + 8 * (e / 2), lane() % 4 * 2 + e % 2, 8, 2, of_half)));
}
static void load_matrices(unsigned (&a)[4], unsigned address) {
  Given* given = meet(address);
  for (int i = 0; i < 4; ++i) memcpy(&a[i], (char*)shared + given[8 * i + lane() / 4][0] + 4 * (lane() % 4), 4);
}
static unsigned shared_address(const void* p) { return (const char*)p - (const char*)shared; }
static void copy16(unsigned to, const void* from, bool given) {
  given ? memcpy((char*)shared + to, from, 16) : memset((char*)shared + to, 0, 16);
}
static void commit() {}
template <int LEFT>
static void wait() {}
template <int INDEX>
static unsigned keyed(int most, unsigned unit) { return most * unit + 60 - 4 * INDEX; }
static unsigned pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static unsigned pack_half(float low, float high) { return to_half(low) | to_half(high) << 16; }
static float low_half(unsigned pair) { return of_half(pair & 65535); }
static unsigned halves(unsigned a, unsigned b, unsigned (*join)(unsigned, unsigned)) {
  return join(half_of(a, 0), half_of(b, 0)) | join(half_of(a, 1), half_of(b, 1)) << 16;
}
static unsigned below(unsigned a, unsigned b) {
  return halves(a, b, [](unsigned x, unsigned y) { return of_half(x) < of_half(y) ? 0x3c00u : 0u; });
}
static unsigned add_halves(unsigned a, unsigned b) {
  return halves(a, b, [](unsigned x, unsigned y) { return to_half(of_half(x) + of_half(y)); });
}
static unsigned max_bf16(unsigned a, unsigned b) {
  return halves(a, b, [](unsigned x, unsigned y) { return of_bf16(x) >= of_bf16(y) ? x : y; });
}
static unsigned min_bf16(unsigned a, unsigned b) {
  return halves(a, b, [](unsigned x, unsigned y) { return of_bf16(x) <= of_bf16(y) ? x : y; });
}
static unsigned whole(float x) { return __float_as_uint(8388608.f + std::floor(x)); }

// ------------------------------------------------------------------------------------------------------------ a launch

static const long* arguments;
static void call();
static void thread() {
  call();
  current->done = true;
  hand_over();
}

extern "C" void launch(int x, int y, int z, int threads, const long* given) {
  arguments = given;
  gridDim = {x, y, z}, blockDim = {threads, 1, 1};
  std::vector<std::vector<char>> stacks(threads, std::vector<char>(1 << 16));
  for (int block = 0; block < x * y * z; ++block) {
    blockIdx = {block % x, block / x % y, block / x / y};
    memset(shared, 0xff, sizeof shared);
    memset(meetings, 0, sizeof meetings);
    waiting = 0;
    fibers.assign(threads, Fiber());
    for (int t = 0; t < threads; ++t) {
      Fiber& fiber = fibers[t];
      fiber.thread = {t, 0, 0};
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks[t].data();
      fiber.context.uc_stack.ss_size = stacks[t].size();
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, thread, 0);
    }
    for (bool more = true; more;) {
      more = false;
      for (Fiber& fiber : fibers) {
        if (fiber.done) continue;
        more = true, current = &fiber;
        swapcontext(&scheduler, &fiber.context);
      }
    }
  }
}
