// One macro: a function of these headers is inlined wherever it is used, on the host and on a
// device alike. Forced, because one header is compiled for several instruction sets into one
// library: an out-of-line copy could be the one of a set that the machine lacks.
#pragma once

#ifdef __CUDACC__
#define MEMKV_HD __host__ __device__ __forceinline__
#else
#define MEMKV_HD inline __attribute__((always_inline))
#endif
