// What the programs tests/sanitize_*.cu share: arrays of the GPU whose allocation ends with them, and random numbers that are the
// same in every run.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kitchen/host/check.h"

namespace kitchen::testing {

inline uint32_t next_random() {
  static uint32_t state = 1;
  return state = state * 1664525u + 1013904223u, state >> 8;
}

// Multiples of 1 / 1024 below 1 in size.
inline std::vector<float> random_floats(size_t count) {
  std::vector<float> values(count);
  for (auto& value : values) value = (static_cast<int>(next_random() % 2001) - 1000) / 1024.0f;
  return values;
}

// An allocation that ends with the array, so that reads and writes beyond it are found.
template <class T>
struct DeviceArray {
  T* data = nullptr;
  size_t count;
  explicit DeviceArray(size_t size) : count(size) { host::check(cudaMalloc(&data, size * sizeof(T)), "cudaMalloc"); }  // not set
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    host::check(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  std::vector<T> read() const {
    std::vector<T> host(count);
    host::check(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }
};

}  // namespace kitchen::testing
