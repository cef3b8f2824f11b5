// device.h: what the CUDA device (train_gpt.cu) shows to C.
#ifndef LLMC_CUDA_DEVICE_H
#define LLMC_CUDA_DEVICE_H

#include "llmc/device.h" // Device

#ifdef __cplusplus
extern "C" {
#endif

// Opens CUDA device `ordinal` and fills the table. Ends the process with one line when it cannot.
Device device_cuda(int ordinal);
void device_cuda_close(Device *device);

#ifdef __cplusplus
}
#endif

#endif
