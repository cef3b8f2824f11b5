// cpu_device.c: the CPU device, which is C, for test_gpt.cu, which is not.
#include "dev/test/cuda/cpu_device.h" // cpu_device_open
#include "llmc/cpu/cpu.h"             // device_cpu

Device cpu_device_open(void) { return device_cpu(); }
