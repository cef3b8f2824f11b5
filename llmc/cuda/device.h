// device.h: what the CUDA device (train_gpt.cu) shows to C.
#ifndef LLMC_CUDA_DEVICE_H
#define LLMC_CUDA_DEVICE_H

#include "llmc/comm_device.h" // CommDevice
#include "llmc/device.h"      // Device

#ifdef __cplusplus
extern "C" {
#endif

// Opens CUDA device `ordinal` and fills the table. Ends the process with one line when it cannot.
Device device_cuda(int ordinal);
void device_cuda_close(Device *device);

// The device of a rank: that of its number among the ranks of its host. Before all other calls: prepares CUDA for a job of `size` ranks. Ends the process
// with one line when the host has fewer devices than ranks.
int device_cuda_ordinal(int local_rank, int local_size, int size);
// What comm_set_device (llmc/comm.h) wants, so that memory of this device is communicated. Comes before comm_group, and comm_finish (or
// comm_set_device(comm, NULL)) before device_cuda_close.
CommDevice device_cuda_comm(Device *device);

#ifdef __cplusplus
}
#endif

#endif
