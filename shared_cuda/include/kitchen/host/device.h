// The device of a launch: made current for a scope, and asked for what a plan depends on.
#pragma once

#include "kitchen/host/check.h"

namespace kitchen::host {

// Makes `device` current, and the former one again at the end. Costs one query when nothing changes.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : former_(device) {
    check(cudaGetDevice(&former_), "cudaGetDevice");
    changed_ = former_ != device;
    if (changed_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(former_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_;
  bool changed_ = false;
};

inline int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace kitchen::host
