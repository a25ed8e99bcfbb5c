// Programmatic dependent launch (PTX ISA, "griddepcontrol"). Both are no-ops in a plain launch.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "kitchen/ptx/griddep.h: compile for sm_90 or later"
#endif

namespace kitchen::ptx {

// Until the grids that this one depends on have finished and their writes are visible.
__device__ __forceinline__ void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allows dependent grids to start. Only after one's own griddep_wait: a dependent that waits for this grid
// must not overtake the grid before it.
__device__ __forceinline__ void griddep_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace kitchen::ptx
