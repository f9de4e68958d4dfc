// Which instruction set's kernels run: the best that the machine has, unless one was asked for.
#pragma once

#include <string>
#include <vector>

#include "tile.h"

namespace memkv {

extern const AttentionKernels kScalarKernels;
extern const AttentionKernels kAvx2Kernels;    // isa_x86.cpp alone refers to these two: where it
extern const AttentionKernels kAvx512Kernels;  // is not built, neither are they

// Those that this machine can run, from scalar to the best. isa_x86.cpp or isa_scalar.cpp.
std::vector<const AttentionKernels*> runnable_kernels();

// In use. At first the best, or the one named by $MEMKV_ISA.
const AttentionKernels& kernels();

// Throws std::invalid_argument where this machine cannot run it.
void set_isa(const std::string& name);

}  // namespace memkv
