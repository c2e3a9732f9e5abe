// hd.h: marks scalar code that also compiles for a GPU.
#pragma once

#ifdef __CUDACC__
#define MEGAMOE_HD __host__ __device__
// Kept out of line on a GPU: taken so rarely that copies of it only fill the instruction cache.
#define MEGAMOE_HD_RARE __host__ __device__ __noinline__
#else
#define MEGAMOE_HD
#define MEGAMOE_HD_RARE
#endif
