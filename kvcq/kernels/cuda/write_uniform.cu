// Write rows in uniform 2-bit codes with one scale: one block for each (tile of tokens, KV head, side). Compiled as
// write_keys.cu is, with the same macros.

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    write_uniform(const bf16* k, const uint4* map_k, const float* shift_k, bf16* sinks_k, bf16* ring_k, bf16* out_k,
                  const bf16* v, const uint4* map_v, const float* shift_v, bf16* sinks_v, bf16* ring_v, bf16* out_v,
                  u8* pages, const long long* slots, const int* positions, const int* requests, const int* buffers,
                  const int* lengths, u64* clamped, long long k_token, long long k_head, long long v_token,
                  long long v_head, int tokens, int heads, int sink_rows, int ring_rows, int block_bytes,
                  int affine_bytes, int words, int windows, int rank_k, int rank_v) {
  const bool values = gridDim.z == 1 || blockIdx.z == 1;  // values alone, or keys and values
  const Side a = values ? Side{v, map_v, shift_v, sinks_v, ring_v, out_v, v_token, v_head}
                        : Side{k, map_k, shift_k, sinks_k, ring_k, out_k, k_token, k_head};
  const Batch b{pages, slots, positions, requests, buffers, lengths, clamped, tokens,
                heads, sink_rows, ring_rows, block_bytes, affine_bytes, words, windows};
  write_uniform_rows(a, b, blockIdx.x, blockIdx.y, values ? rank_v : rank_k, values);
}
