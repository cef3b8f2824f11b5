// device.h: what the CUDA device (train_gpt.cu) shows to C.
#ifndef LLMC_CUDA_DEVICE_H
#define LLMC_CUDA_DEVICE_H

#include "llmc/device.h" // Device

#ifdef __cplusplus
extern "C" {
#endif

// Devices that this process sees; with none, or when CUDA fails, 0 and why.
int device_cuda_count(char *why, size_t why_bytes);

// Opens CUDA device `ordinal` and fills the table. Ends the process with one line when it cannot.
Device device_cuda(int ordinal);

#ifdef __cplusplus
}
#endif

#endif
