// yardstick_read for a package's Python module (a pybind11 module): addresses and the stream as integers.
#pragma once

#include <cstdint>

#include "kitchen/bench/yardstick.h"
#include "kitchen/host/device.h"

namespace kitchen::bench {

template <class Module>
void bind_yardstick_read(Module& m) {
  m.def("yardstick_read", [](uintptr_t source, int64_t bytes, uintptr_t sink, int device, uintptr_t stream) {
    host::DeviceGuard guard(device);
    yardstick_read(reinterpret_cast<const void*>(source), bytes, reinterpret_cast<void*>(sink),
                   host::attribute(cudaDevAttrMultiProcessorCount, device), reinterpret_cast<cudaStream_t>(stream));
  });
}

}  // namespace kitchen::bench
