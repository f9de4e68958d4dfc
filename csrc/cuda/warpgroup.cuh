// Products of a warpgroup, four warps that begin at a multiple of four, on sm_90a:
//
//     C += A B        64 rows x kColumns, over 16        in registers; in either; in shared memory
//
// Warp w has rows 16w .. 16w + 15 of A and C, as fragments of instructions.cuh, C's one for every 8
// columns; in shared memory A looks like B. What B looks like, Matrices says.
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

// Where B is: rows of 16, 32 or 64 bytes along k, eight of them side by side, and as many columns as
// there are. The pieces of 16 bytes of longer rows are swizzled: see swizzled_piece().
struct Matrices {
  uint32_t lower, upper;

  // along_k: bytes to the next 8 of k, where rows have 16 bytes.
  template <int kRowBytes>
  static __device__ __forceinline__ Matrices at(uint32_t address, uint32_t along_k) {
    constexpr uint32_t kSwizzle = kRowBytes == 16 ? 0 : kRowBytes == 32 ? 3 : 2;
    return {address >> 4 | along_k >> 4 << 16, kSwizzle << 30 | 8 * kRowBytes >> 4};
  }
  __device__ __forceinline__ Matrices further(uint32_t bytes) const {
    return {lower + bytes / 16, upper};
  }
};

// Where a row's piece of 16 bytes is, so that eight rows' are in different banks. Rows lie at
// multiples of 8 * kRowBytes.
template <int kRowBytes>
__device__ __forceinline__ int swizzled_piece(int row, int piece) {
  return kRowBytes == 16   ? piece
         : kRowBytes == 32 ? piece ^ (row >> 2 & 1)
                           : piece ^ (row >> 1 & 3);
}

// Shared memory that this thread wrote is seen by the products of whoever passes a later barrier.
__device__ __forceinline__ void fence_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most so many of the groups committed last are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
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

// So many operands, as instructions name them and as the compiler takes them.
#define MEMKV_R4 "%0, %1, %2, %3"
#define MEMKV_R16 MEMKV_R4 ", %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MEMKV_R32 \
  MEMKV_R16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MEMKV_R36 MEMKV_R32 ", %32, %33, %34, %35"
#define MEMKV_R44 MEMKV_R36 ", %36, %37, %38, %39, %40, %41, %42, %43"
#define MEMKV_R52 MEMKV_R44 ", %44, %45, %46, %47, %48, %49, %50, %51"
#define MEMKV_R68 \
  MEMKV_R52       \
  ", %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67"
#define MEMKV_R128                                                                               \
  MEMKV_R68                                                                                      \
  ", %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83"             \
  ", %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99"             \
  ", %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
  "%115"                                                                                         \
  ", %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MEMKV_F4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define MEMKV_F16(i) MEMKV_F4(i), MEMKV_F4(i + 4), MEMKV_F4(i + 8), MEMKV_F4(i + 12)
#define MEMKV_C4 MEMKV_F4(0)
#define MEMKV_C16 MEMKV_C4, MEMKV_F4(4), MEMKV_F4(8), MEMKV_F4(12)
#define MEMKV_C32 MEMKV_C16, MEMKV_F16(16)
#define MEMKV_C36 MEMKV_C32, MEMKV_F4(32)
#define MEMKV_C44 MEMKV_C36, MEMKV_F4(36), MEMKV_F4(40)
#define MEMKV_C52 MEMKV_C44, MEMKV_F4(44), MEMKV_F4(48)
#define MEMKV_C68 MEMKV_C52, MEMKV_F16(52)
#define MEMKV_C128                                                                       \
  MEMKV_C68, MEMKV_F16(68), MEMKV_F16(84), MEMKV_F16(100), MEMKV_F4(116), MEMKV_F4(120), \
      MEMKV_F4(124)
#define MEMKV_PRODUCT_OF(T, NAME, COLUMNS, FLOATS, A, B, SHARED_A, SHARED_B)         \
  template <>                                                                        \
  struct Warpgroup<T, COLUMNS> {                                                     \
    static __device__ __forceinline__ void multiply_add(float* c,                    \
                                                        const uint32_t (&a)[4],      \
                                                        const Matrices& b) {         \
      asm volatile(                                                                  \
          "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                             \
          ".reg .b64 matrices;\nmov.b64 matrices, {" B                               \
          "};\n"                                                                     \
          "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME      \
          " {" MEMKV_R##FLOATS "}, {" A "}, matrices, add, 1, 1, 0;\n}"              \
          : MEMKV_C##FLOATS                                                          \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.lower), "r"(b.upper)); \
    }                                                                                \
    static __device__ __forceinline__ void multiply_add(float* c,                    \
                                                        const Matrices& a,           \
                                                        const Matrices& b) {         \
      asm volatile(                                                                  \
          "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                             \
          ".reg .b64 rows, matrices;\n"                                              \
          "mov.b64 rows, {" SHARED_A "};\nmov.b64 matrices, {" SHARED_B              \
          "};\n"                                                                     \
          "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME      \
          " {" MEMKV_R##FLOATS "}, rows, matrices, add, 1, 1, 0, 0;\n}"              \
          : MEMKV_C##FLOATS                                                          \
          : "r"(a.lower), "r"(a.upper), "r"(b.lower), "r"(b.upper));                 \
    }                                                                                \
  };
#define MEMKV_PRODUCT(COLUMNS, FLOATS, A, B, SHARED_A, SHARED_B)                     \
  MEMKV_PRODUCT_OF(__nv_bfloat16, "bf16", COLUMNS, FLOATS, A, B, SHARED_A, SHARED_B) \
  MEMKV_PRODUCT_OF(__half, "f16", COLUMNS, FLOATS, A, B, SHARED_A, SHARED_B)
MEMKV_PRODUCT(8, 4, "%4, %5, %6, %7", "%8, %9", "%4, %5", "%6, %7")
MEMKV_PRODUCT(32, 16, "%16, %17, %18, %19", "%20, %21", "%16, %17", "%18, %19")
MEMKV_PRODUCT(64, 32, "%32, %33, %34, %35", "%36, %37", "%32, %33", "%34, %35")
MEMKV_PRODUCT(72, 36, "%36, %37, %38, %39", "%40, %41", "%36, %37", "%38, %39")
MEMKV_PRODUCT(88, 44, "%44, %45, %46, %47", "%48, %49", "%44, %45", "%46, %47")
MEMKV_PRODUCT(104, 52, "%52, %53, %54, %55", "%56, %57", "%52, %53", "%54, %55")
MEMKV_PRODUCT(136, 68, "%68, %69, %70, %71", "%72, %73", "%68, %69", "%70, %71")
MEMKV_PRODUCT(256, 128, "%128, %129, %130, %131", "%132, %133", "%128, %129", "%130, %131")
#undef MEMKV_PRODUCT
#undef MEMKV_PRODUCT_OF
#undef MEMKV_C4
#undef MEMKV_C16
#undef MEMKV_C32
#undef MEMKV_C36
#undef MEMKV_C44
#undef MEMKV_C52
#undef MEMKV_C68
#undef MEMKV_C128
#undef MEMKV_F16
#undef MEMKV_F4
#undef MEMKV_R4
#undef MEMKV_R16
#undef MEMKV_R32
#undef MEMKV_R36
#undef MEMKV_R44
#undef MEMKV_R52
#undef MEMKV_R68
#undef MEMKV_R128

}  // namespace memkv::cuda
