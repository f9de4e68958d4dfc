// The instructions that C++ has no words for, one function each.
//
// Fragments of mma.m16n8k16, in lane l with g = l / 4 and q = l % 4; a register holds two elements:
//
//     A 16 x 16   a0 (g, 2q..)   a1 (g + 8, 2q..)   a2 (g, 8 + 2q..)   a3 (g + 8, 8 + 2q..)
//     B 16 x 8    b0 (2q.., g)   b1 (8 + 2q.., g)
//     C 16 x 8    c0 (g, 2q)   c1 (g, 2q + 1)   c2 (g + 8, 2q)   c3 (g + 8, 2q + 1)
//
// ldmatrix gives the four matrices whose rows lanes 0..7, 8..15, 16..23 and 24..31 point to: lane l
// gets elements 2q, 2q + 1 of row g of each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace memkv::cuda {

struct Fragment {
  uint32_t r[4];
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ Fragment load_matrices(uint32_t address) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
               : "r"(address));
  return f;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// The transpose of an 8 x 8 matrix that lies across the warp.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// threadIdx.x % 32 and gridDim.x, found anew wherever they are asked for: what follows from them takes
// no registers in between.
__device__ __forceinline__ int lane_again() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
__device__ __forceinline__ int blocks_again() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

// Adds 1. What this block of threads wrote before its barrier is seen by whoever reads a later
// count.
__device__ __forceinline__ int32_t arrive_at(int32_t* counter) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// Two numbers of type T in a register; the terms that add up to a float.
template <typename T>
struct Packed;

template <>
struct Packed<__nv_bfloat16> {
  static constexpr uint32_t kOnes = 0x3f803f80u;
  static __device__ __forceinline__ uint32_t pack(float a, float b) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(two);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  }
  static __device__ __forceinline__ void multiply_add(float (&c)[4],
                                                      const uint32_t (&a)[4],
                                                      uint32_t b0,
                                                      uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Packed<__half> {
  static constexpr uint32_t kOnes = 0x3c003c00u;
  static __device__ __forceinline__ uint32_t pack(float a, float b) {
    const __half2 two = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(two);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    return __half22float2(reinterpret_cast<const __half2&>(x));
  }
  static __device__ __forceinline__ void multiply_add(float (&c)[4],
                                                      const uint32_t (&a)[4],
                                                      uint32_t b0,
                                                      uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// term[0] + term[1] + ... = (a, b), as nearly as kTerms numbers of 8 (bfloat16) or 11 digits can.
template <typename T, int kTerms>
__device__ __forceinline__ void split(float a, float b, uint32_t (&term)[kTerms]) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    term[i] = Packed<T>::pack(a, b);
    const float2 taken = Packed<T>::unpack(term[i]);
    a -= taken.x;
    b -= taken.y;
  }
}

__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

// 16 bytes to shared memory, of which the first `bytes` are read and the rest are zeros.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, int bytes) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void copy_async_8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Until here a kernel may run beside the one before it on the stream; from here on what that one
// wrote is seen. The next kernel may begin as well, and will wait in its turn.
__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier in shared memory, for so many arrivals.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// A thread's arrival, without a branch, which products under way may not cross.
__device__ __forceinline__ void barrier_arrive_if(bool does, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      ".reg .pred does;\n"
      "setp.ne.b32 does, %1, 0;\n"
      "@does mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}" ::"r"(barrier),
      "r"(int(does))
      : "memory");
}
// Arrives once the copy_async_16() of this thread so far are done.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#endif
      "@done bra found;\n"
      "bra again;\n"
      "found:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whole warps of a block that wait for each other, at one of its 16 barriers; 0 is __syncthreads's.
struct Team {
  int threads, barrier;

  __device__ __forceinline__ void sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MEMKV_BULK_COPY 1

// Makes initialised barriers, and shared memory written by threads, known to the copy engine.
__device__ __forceinline__ void fence_for_copies() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Linear memory, read once: it leaves the L2 cache before plans, queries and partials do.
__device__ __forceinline__ void copy_bulk(uint32_t to,
                                          const void* from,
                                          uint32_t bytes,
                                          uint32_t barrier) {
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;  // as createpolicy.fractional makes it
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from),
      "r"(bytes),
      "r"(barrier),
      "l"(kEvictFirst)
      : "memory");
}
#endif

}  // namespace memkv::cuda
