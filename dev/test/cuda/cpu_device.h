// cpu_device.h: the CPU device, which is C, for test_gpt.cu, which is not.
#ifndef TEST_CUDA_CPU_DEVICE_H
#define TEST_CUDA_CPU_DEVICE_H

#include "llmc/device.h" // Device

#ifdef __cplusplus
extern "C" {
#endif
Device cpu_device_open(void);
#ifdef __cplusplus
}
#endif

#endif
