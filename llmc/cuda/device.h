// device.h: what the CUDA device (train_gpt.cu) shows to C.
#ifndef LLMC_CUDA_DEVICE_H
#define LLMC_CUDA_DEVICE_H

#include "llmc/comm_device.h" // CommDevice
#include "llmc/device.h"      // Device

#ifdef __cplusplus
extern "C" {
#endif

// The device of a rank: that of its number among the ranks of its host. -1 and why, when CUDA sees none, or fewer than there are ranks. Before all
// other calls: it prepares CUDA for a job of `size` ranks.
int device_cuda_ordinal(int local_rank, int local_size, int size, char *why, size_t why_bytes);

// Whether there are kernels for attention of this shape. Wants no device.
bool device_cuda_computes(Dtype dtype, AttentionShape shape);

// Opens a CUDA device and fills the table. Ends the process with one line when it cannot.
Device device_cuda(int ordinal);

// From now on the algorithms of matrix products, which are chosen by timing, are kept in this file, and those that it holds are taken: a resumed
// run repeats the bits of one that went through. Before the first op. TRAIN_GPT_ALGORITHMS in the environment names another file, which then
// counts.
void device_cuda_keep_choices(Device *device, const char *path);

// What comm_set_device (llmc/comm.h) wants, so that memory of this device is communicated. Comes before comm_group, and comm_finish (or
// comm_set_device(comm, NULL)) before the device is closed.
CommDevice device_cuda_comm(Device *device);

#ifdef __cplusplus
}
#endif

#endif
