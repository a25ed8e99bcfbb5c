// Kernel launches, with an optional cluster, on a given stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kitchen/host/check.h"

namespace kitchen::host {

struct Launch {
  int64_t grid;
  int block;
  int cluster = 1;      // CTAs per cluster; more than 1 needs compute capability 9.0
  size_t smem = 0;      // dynamic shared memory, bytes
  cudaStream_t stream;
  bool programmatic = false;  // start while the kernel in front ends: the kernel waits for it itself (ptx/griddep.h); sm_90 and later
};

template <class... Args>
void launch(const char* name, void (*kernel)(Args...), const Launch& where, Args... args) {
  if (where.smem > 48 * 1024) {  // more must be asked for, once per kernel and device; asking again is cheap
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(where.smem)), name);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(where.grid));
  config.blockDim = dim3(static_cast<unsigned>(where.block));
  config.dynamicSmemBytes = where.smem;
  config.stream = where.stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (where.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(where.cluster);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  if (where.programmatic) {
    cudaLaunchAttribute& programmatic = attributes[config.numAttrs++];
    programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    programmatic.val.programmaticStreamSerializationAllowed = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, args...), name);
}

}  // namespace kitchen::host
