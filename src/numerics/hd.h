// hd.h: marks scalar code that also compiles for a GPU.
#pragma once

#ifdef __CUDACC__
#define MEGAMOE_HD __host__ __device__
#else
#define MEGAMOE_HD
#endif
