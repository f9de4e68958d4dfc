// Products of a warpgroup, four warps that begin at a multiple of four, on sm_90a:
//
//     C += A B        64 rows x kColumns, over 16        in registers; in registers; in shared memory
//
// Warp w has rows 16w .. 16w + 15 of A and C, as fragments of instructions.cuh, C's one for every 8
// columns. B lies in core matrices, 8 columns x 16 bytes, 128 bytes from a column group to the next.
// Products are asynchronous: what they read and write is left alone until wait_for_products().
#pragma once

#include "instructions.cuh"

namespace memkv::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kHasWarpgroups = true;
#else
inline constexpr bool kHasWarpgroups = false;
#endif

// Registers of each thread of this warpgroup, from here on: a multiple of 8. Without warpgroups they
// stay as they are.
template <int kCount>
__device__ __forceinline__ void give_registers_back() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// Where B is; along_k: bytes to its next 8 of k.
__device__ __forceinline__ uint64_t core_matrices(uint32_t address, uint32_t along_k) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(along_k >> 4) << 16 |
         uint64_t(128 >> 4) << 32;
}

// Shared memory that this thread wrote is seen by the products of whoever passes a later barrier.
__device__ __forceinline__ void fence_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Keeps what is done with registers on its side of a wait.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Whether it is true for any thread of the warpgroup; barrier: one of its own.
__device__ __forceinline__ bool any_of_warpgroup(int barrier, bool x) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.b32 mine, %1, 0;\n"
      "barrier.cta.red.or.aligned.pred all, %2, 128, mine;\n"
      "selp.b32 %0, 1, 0, all;\n"
      "}"
      : "=r"(any)
      : "r"(int(x)), "r"(barrier)
      : "memory");
  return any != 0;
}

// One product; c are kColumns / 2 floats.
template <typename T, int kColumns>
struct Warpgroup;

#define MEMKV_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define MEMKV_C16(i) MEMKV_C4(i), MEMKV_C4(i + 4), MEMKV_C4(i + 8), MEMKV_C4(i + 12)
#define MEMKV_PRODUCT(T, NAME, COLUMNS, REGISTERS, OPERANDS, ...)                              \
  template <>                                                                                  \
  struct Warpgroup<T, COLUMNS> {                                                               \
    static __device__ __forceinline__ void multiply_add(float* c,                              \
                                                        const uint32_t (&a)[4],                \
                                                        uint64_t b) {                          \
      asm volatile(                                                                            \
          "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME " {" REGISTERS \
          "}, {" OPERANDS ", add, 1, 1, 0;\n}"                                                 \
          : __VA_ARGS__                                                                        \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                               \
    }                                                                                          \
  };
MEMKV_PRODUCT(__nv_bfloat16, "bf16", 8, "%0, %1, %2, %3", "%4, %5, %6, %7}, %8", MEMKV_C4(0))
MEMKV_PRODUCT(__half, "f16", 8, "%0, %1, %2, %3", "%4, %5, %6, %7}, %8", MEMKV_C4(0))
MEMKV_PRODUCT(__nv_bfloat16,
              "bf16",
              16,
              "%0, %1, %2, %3, %4, %5, %6, %7",
              "%8, %9, %10, %11}, %12",
              MEMKV_C4(0),
              MEMKV_C4(4))
MEMKV_PRODUCT(__half,
              "f16",
              16,
              "%0, %1, %2, %3, %4, %5, %6, %7",
              "%8, %9, %10, %11}, %12",
              MEMKV_C4(0),
              MEMKV_C4(4))
MEMKV_PRODUCT(__nv_bfloat16,
              "bf16",
              32,
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
              "%16, %17, %18, %19}, %20",
              MEMKV_C16(0))
MEMKV_PRODUCT(__half,
              "f16",
              32,
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
              "%16, %17, %18, %19}, %20",
              MEMKV_C16(0))
MEMKV_PRODUCT(__nv_bfloat16,
              "bf16",
              64,
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
              "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
              "%32, %33, %34, %35}, %36",
              MEMKV_C16(0),
              MEMKV_C16(16))
MEMKV_PRODUCT(__half,
              "f16",
              64,
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
              "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
              "%32, %33, %34, %35}, %36",
              MEMKV_C16(0),
              MEMKV_C16(16))
#undef MEMKV_PRODUCT
#undef MEMKV_C16
#undef MEMKV_C4

}  // namespace memkv::cuda
