// How nearly everything that kernels are made of is declared: a kernel is one function.
#pragma once
#define PELTON_INLINE inline __attribute__((always_inline))
