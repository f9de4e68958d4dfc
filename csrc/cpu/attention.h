#pragma once

#include "memkv/attention_args.h"

namespace memkv {

// Paged attention over segments; what it computes is in csrc/README.md.
void paged_attention(const Attention& call);

}  // namespace memkv
