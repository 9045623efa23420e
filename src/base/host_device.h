#pragma once

// Marks functions that both a kernel of a GPU and a loop on the CPU call. Such a function is the arithmetic of an element, or the work of
// one thread of a kernel, so tests without a GPU run it.
#if defined(__CUDACC__)
#define FSDP_HOST_DEVICE __host__ __device__
#else
#define FSDP_HOST_DEVICE
#endif

// Marks functions for the arithmetic of an element. They are always inlined: a call that is left in a loop, as compilers leave some in
// large files, costs the vector instructions.
#if defined(__CUDACC__)
#define FSDP_ELEMENT __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define FSDP_ELEMENT inline __attribute__((always_inline))
#else
#define FSDP_ELEMENT inline
#endif

// Before a loop of a few rounds, whose arrays a GPU then has in registers.
#if defined(__CUDA_ARCH__)
#define FSDP_UNROLL _Pragma("unroll")
#else
#define FSDP_UNROLL
#endif
